"""What a policy would make of a model: `fairshard.plan`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fairshard.extras.planning.memory import OPTIMIZERS as OPTIMIZERS
from fairshard.extras.planning.memory import plan_memory
from fairshard.extras.planning.wrap_plan import WrapPlan
from fairshard.nn.data_parallel.fully_sharded_data_parallel import FullyShardedDataParallel
from fairshard.planning.padding import OwnedBytes
from fairshard.planning.units import UnitPlan
from fairshard.setup.ignored import resolve_ignored
from fairshard.setup.lines import PlacementFn
from fairshard.utils.device import default_device_type


def describe(
    module: nn.Module,
    policy: Any = None,
    world_size: int = 1,
    *,
    num_replicas: int | None = None,
    optimizer: str | Callable[[list[nn.Parameter]], Optimizer] = "adamw",
    device: str | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    placement_fn: PlacementFn | None = None,
    **wrapper_kwargs: Any,
) -> WrapPlan:
    """Plan ``FullyShardedDataParallel(module, auto_wrap_policy=policy, **wrapper_kwargs)`` without wrapping.

    Changes nothing and needs no process group; the module may be on the meta device, where a model of any size takes
    no memory.

    Args:
        module: the model, not wrapped.
        policy: the ``auto_wrap_policy``; None makes one unit.
        world_size: number of ranks to shard over, or with NO_SHARD to average gradients over.
        num_replicas: with hybrid strategies, the number of groups of ``world_size`` ranks.
        optimizer: a name from ``OPTIMIZERS``, or a function from parameters to an optimizer.
        device: type of the device that computes, such as ``"cpu"`` or ``"cuda"``; if None, as in this process.
        ignored_modules: modules that are not sharded, including all modules below them.
        placement_fn: maps a parameter to a ``RowBlocks`` or an ``Owned``, like ``shard_placement_fn`` of
            ``fully_shard``, or to None. Sizes of shards and memory are those of the rank that owns most.
        wrapper_kwargs: other arguments of the wrapper, including ``ignored_states`` and ``ignored_parameters``.

    Returns: units, buckets and the predicted peak memory by term, without activations.

    Raises:
        ValueError: the module already contains a unit, an argument is invalid for a plan, or the wrapper would raise.
        TypeError: the wrapper would raise.
    """
    bound = inspect.signature(FullyShardedDataParallel).bind(module, **wrapper_kwargs)
    bound.apply_defaults()
    arguments = {name: value for name, value in bound.arguments.items() if name not in ("module", "auto_wrap_policy")}
    others = arguments["ignored_states"], arguments["ignored_parameters"]
    units = UnitPlan(module, policy, arguments, resolve_ignored(module, ignored_modules, *others)).units
    loads = [0] * max(1, world_size)
    if placement_fn is not None and world_size > 0:
        for unit in reversed(units):  # inner units are sharded first
            unit.place(placement_fn, world_size, loads)
        for unit in units:
            unit.rank = loads.index(max(loads))
    plan = plan_memory(units, world_size, num_replicas, optimizer, device or default_device_type())
    return replace(plan, owned=OwnedBytes.of(loads))
