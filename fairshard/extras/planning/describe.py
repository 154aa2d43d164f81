"""What a policy would make of a model: `fairshard.plan`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fairshard.extras.planning.peak import OPTIMIZERS, UnitBytes, Walk, lasting_terms
from fairshard.extras.planning.wrap_plan import MemoryTerm, WrapPlan
from fairshard.nn.data_parallel.fully_sharded_data_parallel import FullyShardedDataParallel
from fairshard.planning.units import PlannedUnit, UnitPlan
from fairshard.setup.ignored import resolve_ignored
from fairshard.setup.lines import PlacementFn
from fairshard.setup.survey import Survey
from fairshard.utils.device import check_device_type, default_device_type


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
    for name, number in (("world_size", world_size), ("num_replicas", num_replicas)):
        if number is not None and number < 1:
            raise ValueError(f"`{name}` must be at least 1, but is {number}.")
    device = device or default_device_type()
    check_device_type("device", device)
    make = OPTIMIZERS.get(optimizer) if isinstance(optimizer, str) else optimizer
    if make is None:
        raise ValueError(
            f"`optimizer` must be one of {', '.join(OPTIMIZERS)} or a function from parameters to an optimizer, but is "
            f"{optimizer!r}."
        )
    bound = inspect.signature(FullyShardedDataParallel).bind(module, **wrapper_kwargs)
    bound.apply_defaults()
    arguments = {name: value for name, value in bound.arguments.items() if name not in ("module", "auto_wrap_policy")}
    others = arguments["ignored_states"], arguments["ignored_parameters"]
    units = UnitPlan(module, policy, arguments, resolve_ignored(Survey(module), ignored_modules, *others)).units
    for unit in units:
        _check_strategy(unit, world_size, num_replicas)
    if placement_fn is not None:
        loads = [0] * world_size
        for unit in reversed(units):  # inner units are sharded first
            unit.place(placement_fn, world_size, loads)
        for unit in units:
            unit.rank = loads.index(max(loads))
    root = units[0]
    num_ranks = world_size * (num_replicas or 1)
    sizes = [UnitBytes.of(unit, world_size, num_ranks, device) for unit in units]
    ahead = root.config.backward_prefetch is not None
    walk = Walk(sizes, root.config.bucket_cap_mb, ahead, _late_nbytes(root))
    terms = [*lasting_terms(units, world_size, make), *(MemoryTerm(*term) for term in walk.terms.items())]
    return WrapPlan(
        world_size,
        device,
        tuple(unit.row(world_size) for unit in units),
        tuple(walk.buckets),
        tuple(term for term in terms if term.nbytes),
        walk.at,
    )


def _check_strategy(unit: PlannedUnit, world_size: int, num_replicas: int | None) -> None:
    strategy, part = unit.config.sharding_strategy, unit.config.reshard_after_forward
    where = f"unit `{unit.fqn or 'root'}`"
    if strategy.is_hybrid != (num_replicas is not None):
        raise ValueError(
            "`num_replicas`, of groups of `world_size` ranks, must be given with hybrid strategies and no others, but "
            f"is {num_replicas} and {where} has {strategy.name}."
        )
    if not isinstance(part, bool) and world_size % part:
        raise ValueError(
            f"`reshard_after_forward` must divide the number of ranks, {world_size}, but is {part} for {where}."
        )


def _late_nbytes(root: PlannedUnit) -> int:
    """Bytes of whole gradients of the parameters that the outermost unit has behind its last inner unit."""
    nbytes = 0
    for step in reversed(root.steps):
        if isinstance(step, PlannedUnit):
            return nbytes
        nbytes += step.numel() * root.config.rule.compute_dtype_of(step.dtype, False).itemsize * step.requires_grad
    return 0
