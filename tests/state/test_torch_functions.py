"""torch.distributed.checkpoint.state_dict over the wrapper: refused, unless one rank has whole parameters."""

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
def test_every_function_is_refused_with_the_cure(kind, flatten):
    """The functions would take each rank's part for the whole: all raise, on all ranks, and change nothing."""
    model, optimizer = wrapped(kind, **layout_of(flatten))
    before = copy.deepcopy(optimizer.state_dict()), model.state_dict()
    saved = {"state": {}, "param_groups": []}
    calls = [
        lambda: get_model_state_dict(model),
        lambda: get_model_state_dict(model, options=WHOLE),
        lambda: get_optimizer_state_dict(model, [optimizer], options=WHOLE),
        lambda: get_state_dict(model, optimizer),
        lambda: set_model_state_dict(model, before[1], options=WHOLE),
        lambda: set_optimizer_state_dict(model, optimizer, saved),
        lambda: set_state_dict(model, optimizer, model_state_dict={}, optim_state_dict=saved),
    ]
    for call in calls * 2:
        with pytest.raises(ParameterShardedError, match=r"Call `model\.state_dict\(\)`.*optim_state_dict\(model, "):
            call()
    after = optimizer.state_dict()
    for number, state in before[0]["state"].items():
        assert_same_state(after["state"][number], state)
    assert_same_state(model.state_dict(), before[1])


@on_ranks(1)
@pytest.mark.parametrize("flatten", [False, "orig"], ids=str)
def test_whole_parameters_and_their_optimizer_state(flatten):
    """On one rank parameters have their own names and shapes: the functions give what ours give."""
    model, optimizer = wrapped("nested", **layout_of(flatten))
    ours = FSDP.optim_state_dict(model, optimizer)
    theirs = get_optimizer_state_dict(model, optimizer)
    assert_same_state(get_model_state_dict(model), model.state_dict())
    assert theirs["state"].keys() == ours["state"].keys()
    for name, state in ours["state"].items():
        assert_same_state(theirs["state"][name], state)


@on_ranks(1)
def test_flat_parameters_on_one_rank_are_refused():
    """A flat parameter has another name than the parameters in it, on one rank too."""
    model, optimizer = wrapped("one")
    with pytest.raises(ParameterShardedError, match="optim_state_dict"):
        get_optimizer_state_dict(model, optimizer)
