"""torch's tools for state dicts and checkpoints work on models sharded in place, as on FSDP2 and plain models."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from fairshard.nn import CPUOffloadPolicy, Owned, RowBlocks, fully_shard
from tests.doors.fully_shard.stateful import copied, shard_odd, sharded_odd, train_odd, whole_of
from tests.kit import rank_device, run_ranks
from tests.kit.doors import whole
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state
from tests.trained import OPTIMIZERS, odd

pytestmark = pytest.mark.behaviour("torch's checkpoints of fully_shard")

STATEFUL = [name for name in OPTIMIZERS if name != "sgd"]  # torch refuses to set full state where there is none
FULL = StateDictOptions(full_state_dict=True)
EVERYWHERE = StateDictOptions(full_state_dict=True, cpu_offload=False)


def _odd(how, seed, optimizer="adamw"):
    """An `Odd`, sharded or plain, and its optimizer."""
    model = odd(seed=seed) if how == "plain" else sharded_odd(how, seed)
    return model, OPTIMIZERS[optimizer]([param for param in model.parameters() if param.requires_grad])


def _flat(state):
    """The full tensors of the optimizer state, by name."""
    return whole_of({f"{name}.{key}": value for name, own in state.items() for key, value in own.items()})


def _whole(model, optimizer):
    """All full state by name, on every rank; optimizer state is sorted, because loading changes its order."""
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(ignore_frozen_params=True))["state"]
    return whole(model) | copied(dict(sorted(_flat(state).items())))


def _save(how, folder, is_async):
    model, optimizer = _odd(how, seed=1)
    train_odd(model, optimizer, range(2))
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    kept = _whole(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if is_async:
            dcp.async_save(state, checkpoint_id=folder).result()
        else:
            dcp.save(state, checkpoint_id=folder)
    return kept


def _load(how, folder):
    model, optimizer = _odd(how, seed=5)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    loaded = _whole(model, optimizer)
    train_odd(model, optimizer, range(1))
    return loaded


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((3, "rows", True), (2, "columns")),
        ((2, "blocks", True), (3, "owned")),
        *(
            pytest.param(before, after, marks=pytest.mark.full)
            for before, after in [
                ((2, "columns", True), (1, "rows")),
                ((1, "rows", False), (4, "whole")),
                ((4, "rows", False), (3, "columns")),
                ((3, "columns", True), (1, "plain")),
                ((1, "plain", False), (3, "rows")),
                ((3, "blocks", False), (1, "plain")),
                ((2, "columns", False), (4, "blocks")),
                ((4, "blocks", True), (2, "rows")),
                ((2, "blocks", True), (3, "blocks")),
                ((3, "owned", False), (2, "blocks")),
                ((1, "owned", True), (4, "owned")),
                ((4, "owned", True), (2, "columns")),
            ]
        ),
    ],
)
def test_a_checkpoint_loads_on_another_number_of_ranks(saved, loaded, tmp_path):
    """Empty shards, scalars and tied weights load on another number of ranks, sharded otherwise, or unsharded."""
    (num_before, how_before, is_async), (num_after, how_after) = saved, loaded
    folder = str(tmp_path / "one")
    expected = run_ranks(num_before, _save, how=how_before, folder=folder, is_async=is_async)[0]
    for actual in run_ranks(num_after, _load, how=how_after, folder=folder):
        assert_same_state(actual, expected)


@on_ranks(2, in_full(3))
@pytest.mark.parametrize("optimizer", ["adamw", *(pytest.param(o, marks=pytest.mark.full) for o in STATEFUL)])
@pytest.mark.parametrize(("how", "other"), [("rows", "columns"), ("blocks", "owned"), ("owned", "blocks")])
def test_whole_state_goes_to_the_plain_model_and_back(how, other, optimizer):
    """Full state loads into the plain model and back, also from rank 0 alone, and training continues the same way."""
    model, own = _odd(how, 1, optimizer)
    train_odd(model, own, range(2))
    weights, moments = copy.deepcopy(get_state_dict(model, own, options=EVERYWHERE))  # torch shares step counts
    assert not any(isinstance(value, DTensor) for value in (*weights.values(), *_leaves(moments)))
    plain, of_plain = _odd("plain", 5, optimizer)
    set_state_dict(plain, of_plain, model_state_dict=weights, optim_state_dict=moments)
    assert_same_state(_whole(plain, of_plain), _whole(model, own))
    again, of_again = _odd(other, 6, optimizer)
    back = copy.deepcopy(get_state_dict(plain, of_plain))
    set_state_dict(again, of_again, model_state_dict=back[0], optim_state_dict=back[1], options=FULL)
    assert_same_state(_whole(again, of_again), _whole(model, own))

    weights, moments = get_state_dict(model, own, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    moments = copy.deepcopy(moments)
    assert bool(weights) == (dist.get_rank() == 0)
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    sent, of_sent = _odd(how, 7, optimizer)
    set_model_state_dict(sent, weights, options=from_first)
    set_optimizer_state_dict(sent, of_sent, moments, options=from_first)
    expected = _whole(model, own)
    assert_same_state(_whole(sent, of_sent), expected)
    for each, of_each in ((model, own), (again, of_again), (sent, of_sent)):
        train_odd(each, of_each, range(2))
    assert_same_state(_whole(again, of_again), _whole(model, own))
    assert_same_state(_whole(sent, of_sent), _whole(model, own))


@on_ranks(2)
@pytest.mark.parametrize("options", [FULL, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)])
@pytest.mark.parametrize("place", [RowBlocks(2), Owned()])
def test_whole_values_give_memory_to_blocks(options, place):
    """A model on the meta device, placed by blocks or owners, gets memory and values from a full state dict."""
    with torch.device("meta"):
        model = nn.Linear(3, 5)
    fully_shard(model, shard_placement_fn=lambda param: place)
    plain = nn.Linear(3, 5, device=rank_device())
    with torch.no_grad():
        plain.weight.copy_(torch.arange(15.0).view(5, 3))
        plain.bias.copy_(torch.arange(5.0))
    has_values = dist.get_rank() == 0 or not options.broadcast_from_rank0
    set_model_state_dict(model, plain.state_dict() if has_values else {}, options=options)
    assert_same_state(whole(model), plain.state_dict())


def _leaves(state):
    return [value for own in state["state"].values() for value in own.values()]


@on_ranks(2)
@pytest.mark.parametrize("kwargs", [{}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}], ids=["", "offload"])
def test_an_optimizers_own_state_dict(kwargs):
    """An optimizer's state dict of DTensors loads into that of a model sharded alike; each then steps its own model."""
    model = shard_odd(odd(), **kwargs)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train_odd(model, optimizer, range(2))
    other = shard_odd(odd(), **kwargs)
    other.load_state_dict(model.state_dict())
    of_other = OPTIMIZERS["adamw"](other.parameters())
    of_other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train_odd(other, of_other, range(2, 4))
    train_odd(model, optimizer, range(2, 4))
    assert_same_state(_whole(other, of_other), _whole(model, optimizer))


@on_ranks(2)
def test_frozen_parameters_can_be_left_out():
    """As on FSDP2, ``ignore_frozen_params`` leaves frozen parameters out, and a state dict without them loads."""
    options = StateDictOptions(ignore_frozen_params=True, full_state_dict=True)
    weights = get_model_state_dict(sharded_odd(), options=options)
    assert not [name for name in weights if name.startswith("frozen.")]
    model = sharded_odd(seed=5)
    set_model_state_dict(model, weights, options=StateDictOptions(strict=False))
    assert_same_state(get_model_state_dict(model, options=options), weights)
    frozen = {name: value for name, value in whole(model).items() if name.startswith("frozen.")}
    assert_same_state(frozen, {name: odd(seed=5).state_dict()[name] for name in frozen})
