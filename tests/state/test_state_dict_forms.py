"""Every form of a state dict carries the weights, bit for bit, into a model with another wrapping."""

import copy

import pytest
import torch
import torch.distributed as dist

from fairshard.nn import (
    FSDP,
    FullStateDictConfig,
    StateDictType,
)
from fairshard.utils.span_tensor import SpanTensor
from tests.covering import all_cells, covering_array, over_cells
from tests.models import tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state
from tests.trained import (
    FLATTEN,
    PLACEMENTS,
    PRECISIONS,
    WRAPPINGS,
    another,
    layout_of,
    odd,
    wrap_odd,
    wrapped_tiny,
)

AXES = {
    "world_size": [1, 2, 3],
    "form": ["full", "cpu", "rank0", "sharded", "local"],
    "flatten": FLATTEN,
    "precision": list(PRECISIONS),
    "placement": list(PLACEMENTS),
    "wrapping": list(WRAPPINGS),
    "into": [*WRAPPINGS, "other_flatten", "plain"],
}
FORMS = {
    "full": (StateDictType.FULL_STATE_DICT, None),
    "cpu": (StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True)),
    "rank0": (StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True, offload_to_cpu=True)),
    "sharded": (StateDictType.SHARDED_STATE_DICT, None),
    "local": (StateDictType.LOCAL_STATE_DICT, None),
}


def target_of(cell):
    """A model with other weights, wrapped as the cell says; local shards load into the same cut only."""
    into = cell["into"]
    if cell["form"] in ("sharded", "local"):
        return wrapped_tiny(cell, cell["wrapping"], seed=7)
    if into == "plain":
        return tiny(seed=7)
    if into == "other_flatten":
        return wrapped_tiny({**cell, "flatten": another(cell["flatten"])}, cell["wrapping"], seed=7)
    return wrapped_tiny(cell, into, seed=7)


def check(cell):
    """A wrapped model's state in one form equals the plain model's, and loads into another model."""
    plain = tiny().state_dict()
    source, target = wrapped_tiny(cell, cell["wrapping"]), target_of(cell)
    for model in (source, target):
        FSDP.set_state_dict_type(model, *FORMS[cell["form"]])
    if cell["form"] == "local" and cell["wrapping"] == "inner":
        return  # only a wrapper has a local state dict
    state = source.state_dict()
    if cell["form"] in ("full", "cpu"):
        assert_same_state(state, plain)
    elif cell["form"] == "rank0":
        if dist.get_rank() == 0:
            assert_same_state(state, plain)
        elif isinstance(source, FSDP):
            assert state == {}
    elif cell["form"] == "sharded":
        assert list(state) == list(plain)
        for name, value in state.items():
            if isinstance(value, SpanTensor):
                expected = plain[name].flatten()[value.start : value.start + value.run.numel()]
                assert torch.equal(value.run.to(expected.device), expected)
                assert value.dtype == expected.dtype
    before = copy.deepcopy(state)
    if cell["form"] == "rank0" and not isinstance(target, FSDP):
        state = [state if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(state)
        state = state[0]  # every rank loads what is not sharded
    result = target.load_state_dict(state)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert list(before) == list(source.state_dict()), "the same again"
    FSDP.set_state_dict_type(target, StateDictType.FULL_STATE_DICT)
    assert_same_state(target.state_dict(), plain)


@over_cells(covering_array(AXES))
@on_ranks()
def test_every_pair_of_settings_keeps_the_weights(cell):
    """Weights survive every pair of forms, precisions, placements, wrappings and world sizes."""
    check(cell)


@pytest.mark.full
@over_cells(all_cells({**AXES, "world_size": [2]}))
@on_ranks()
def test_every_combination_of_settings_keeps_the_weights(cell):
    """Weights survive every combination of these settings, on two ranks."""
    check(cell)


@over_cells(covering_array({"world_size": [1, 2, 3], "flatten": FLATTEN, "form": list(FORMS)}))
@on_ranks()
def test_odd_parameters_and_buffers(cell):
    """One-element, empty, 0-d, tied and frozen parameters and all kinds of buffers are as in the plain model's dict."""
    form, flatten = cell["form"], cell["flatten"]
    plain = odd().state_dict()
    source, target = (wrap_odd(odd(seed), **layout_of(flatten)) for seed in (1, 2))
    names = [name for name, _ in source.named_parameters()]
    for model in (source, target):
        FSDP.set_state_dict_type(model, *FORMS[form])
    state = source.state_dict()
    if form in ("full", "cpu"):
        assert_same_state(state, plain)
    elif form == "sharded":
        assert list(state) == list(plain)
    target.load_state_dict(state)
    FSDP.set_state_dict_type(target, StateDictType.FULL_STATE_DICT)
    assert_same_state(target.state_dict(), plain)
    assert [name for name, _ in source.named_parameters()] == names


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["full", "rank0", "sharded"])
def test_other_dtypes(dtype, form):
    """A model of another dtype keeps it, to the bit, both on rank 0 and in shards."""
    plain = odd().to(dtype).state_dict()
    source, target = (wrap_odd(odd(seed).to(dtype)) for seed in (1, 2))
    for model in (source, target):
        FSDP.set_state_dict_type(model, *FORMS[form])
    target.load_state_dict(source.state_dict())
    FSDP.set_state_dict_type(target, StateDictType.FULL_STATE_DICT)
    assert_same_state(target.state_dict(), plain)
