"""The ways to shard a model, and what a test asks of a model whichever way it was sharded."""

import contextlib
from functools import partial

import pytest
import torch

from fairshard.engine.tree import units_below
from fairshard.nn import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.utils.collectives import counters, reset_counters

DOORS = {
    "flat": FSDP,
    "apart": partial(FSDP, flatten_parameters=False),
    "orig": partial(FSDP, use_orig_params=True),
    "fully_shard": fully_shard,
}
SETTINGS = {  # of the wrapper, and of `fully_shard`
    "plain": ({}, {}),
    "bf16": (
        {"mixed_precision": True, "compute_dtype": torch.bfloat16},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
    ),
    "offload": ({"cpu_offload": True}, {"offload_policy": CPUOffloadPolicy()}),
    "kept": ({"reshard_after_forward": False}, {"reshard_after_forward": False}),
}

every_door = pytest.mark.parametrize("door", DOORS)
main_doors = pytest.mark.parametrize("door", ["flat", "orig", "fully_shard"])
both_apis = pytest.mark.parametrize("door", ["flat", "fully_shard"])


def sharding(door, setting="plain", **kwargs):
    """The function that shards one module through ``door``, with one of `SETTINGS` and other arguments."""
    return partial(DOORS[door], **SETTINGS[setting][door == "fully_shard"], **kwargs)


def shard(model, door, *names, setting="plain", **kwargs):
    """``model`` as a unit, around units of its submodules ``names``, the innermost first."""
    one = sharding(door, setting, **kwargs)
    for name in names:
        model.set_submodule(name, one(model.get_submodule(name)))
    return one(model)


def inside(model):
    """The module inside of a wrapper, or the module that was sharded in place."""
    return model.module if isinstance(model, FSDP) else model


def whole(model):
    """Copies of the whole parameters and buffers by their plain names, on every rank. **Collective.**"""
    state = model.state_dict()
    return {name: full(value).detach().clone() for name, value in state.items()}


def full(value):
    """``value``, or what it is whole if it is a DTensor. **Collective.**"""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def whole_grads(model):
    """Copies of the whole gradients by plain names; None where there is none. **Collective.**"""
    is_wrapped = isinstance(model, FSDP)
    with FSDP.summon_full_params(model, with_grads=True) if is_wrapped else contextlib.nullcontext():
        params = inside(model).named_parameters()
        return {name: None if param.grad is None else full(param.grad).clone() for name, param in params}


@contextlib.contextmanager
def no_sync(model):
    """Backwards in this context keep their gradients on their rank."""
    if hasattr(model, "no_sync"):  # of the wrapper, and of DDP
        with model.no_sync():
            yield
        return
    set_sync = getattr(model, "set_requires_gradient_sync", lambda _: None)  # a plain model sends nothing anyway
    set_sync(False)
    yield
    set_sync(True)


def gathered(model):
    """The names of the units with parameters that are gathered."""
    return [fqn for fqn, unit in units_below(model) if unit.is_gathered and unit.flat_params]


def num_gathers():
    """The number of all-gathers since the last call."""
    count = counters().get("all_gather", (0, 0))[0]
    reset_counters()
    return count
