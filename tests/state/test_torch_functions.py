"""torch.distributed.checkpoint.state_dict over the wrapper: models work, what would be this rank's part is refused."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from fairshard.errors import ParameterShardedError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import StateDictType
from tests.models import mlp
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn
from tests.trained import FLATTEN, layout_of

WHOLE = StateDictOptions(full_state_dict=True)


def net():
    """Two Linears and a norm with buffers."""
    return nn.Sequential(*mlp(4, 6, 5), nn.BatchNorm1d(5))


def wrapped(kind, **options):
    """`net` in one unit, with an inner unit, or plain around a unit; and an AdamW that has stepped."""
    model = net()
    if kind != "one":
        model[2] = FSDP(model[2], **options)
    if kind != "inside":
        model = FSDP(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(randn(3, 4, key=("x", dist.get_rank()))).square().sum().backward()
    optimizer.step()
    return model, optimizer


@on_ranks(2)
@pytest.mark.parametrize("flatten", FLATTEN, ids=str)
@pytest.mark.parametrize("kind", ["one", "nested", "inside"])
def test_optimizer_state_is_refused_with_the_cure(kind, flatten):
    """All four functions, which took each rank's part for the whole state, raise on all ranks, also a second time."""
    model, optimizer = wrapped(kind, **layout_of(flatten))
    before = copy.deepcopy(optimizer.state_dict())
    saved = {"state": {}, "param_groups": []}
    calls = [
        lambda: get_optimizer_state_dict(model, [optimizer], options=WHOLE),
        lambda: get_state_dict(model, optimizer),
    ]
    for call in calls * 2:
        with pytest.raises(ParameterShardedError, match=r"Call `FullyShardedDataParallel\.optim_state_dict\(model, "):
            call()
    calls = [
        lambda: set_optimizer_state_dict(model, optimizer, saved),
        lambda: set_state_dict(model, optimizer, model_state_dict={}, optim_state_dict=saved),
    ]
    for call in calls:
        with pytest.raises(ParameterShardedError, match=r"Call `optimizer\.load_state_dict\(.*_to_load"):
            call()
    after = optimizer.state_dict()
    for number, state in before["state"].items():
        assert_same_state(after["state"][number], state)


@on_ranks(1, 2)
@pytest.mark.parametrize("flatten", FLATTEN, ids=str)
@pytest.mark.parametrize("kind", ["one", "nested", "inside"])
def test_model_state_is_the_models(kind, flatten):
    """The functions for models give and take whole values, on all ranks; with `cpu_offload` rank 0 alone has them."""
    model, _ = wrapped(kind, **layout_of(flatten))
    expected = model.state_dict()
    for options in (None, WHOLE, StateDictOptions(cpu_offload=True)):
        assert_same_state(get_model_state_dict(model, options=options), expected)
    on_first = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert_same_state(on_first, expected if dist.get_rank() == 0 else {})
    assert_same_state(get_state_dict(model, [])[0], expected)
    wanted = {name: value + 1 for name, value in expected.items()}
    assert not any(set_model_state_dict(model, copy.deepcopy(wanted)))
    assert_same_state(model.state_dict(), wanted)


@on_ranks(2)
@pytest.mark.parametrize("flatten", FLATTEN, ids=str)
def test_options_that_need_whole_parameters_are_refused(flatten):
    """Distributing or gathering shards, and leaving out frozen parameters by name, raise with the cure."""
    model, _ = wrapped("nested", **layout_of(flatten))
    whole = model.state_dict()
    with pytest.raises(ParameterShardedError, match=r"Call `model\.load_state_dict\(state\)`"):
        set_model_state_dict(model, whole, options=WHOLE)
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    with pytest.raises(ParameterShardedError, match=r"SHARDED_STATE_DICT is set\. Call `.*FULL_STATE_DICT\)` first"):
        get_model_state_dict(model, options=WHOLE)
    FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
    for param in model[2].parameters():
        param.requires_grad_(False)
    trained = StateDictOptions(ignore_frozen_params=True)
    if flatten is True:
        with pytest.raises(ParameterShardedError, match=r"Pass `use_orig_params=True`"):
            get_model_state_dict(model, options=trained)
    else:
        kept = {name: value for name, value in whole.items() if not name.startswith("2.")}
        assert_same_state(get_model_state_dict(model, options=trained), kept)


@on_ranks(1)
@pytest.mark.parametrize("flatten", [False, "orig"], ids=str)
def test_whole_parameters_keep_their_optimizer_state(flatten):
    """On one rank parameters have their own names and shapes: the functions give what ours give."""
    model, optimizer = wrapped("nested", **layout_of(flatten))
    ours = FSDP.optim_state_dict(model, optimizer)
    theirs = get_optimizer_state_dict(model, optimizer)
    assert theirs["state"].keys() == ours["state"].keys()
    for name, state in ours["state"].items():
        assert_same_state(theirs["state"][name], state)


@on_ranks(1)
def test_flat_parameters_on_one_rank_are_refused():
    """A flat parameter has another name than the parameters in it, on one rank too."""
    model, optimizer = wrapped("one")
    with pytest.raises(ParameterShardedError, match="optim_state_dict"):
        get_optimizer_state_dict(model, optimizer)
