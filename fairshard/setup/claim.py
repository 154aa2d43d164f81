"""Sets up a model at its first forward: finds its units, compares them across ranks, and creates their root."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fairshard.checks.agreement import check_agreement, raise_together
from fairshard.checks.leaf_writes import unpin
from fairshard.checks.usage import assert_idle
from fairshard.engine.root import Root
from fairshard.engine.shared import Shared
from fairshard.engine.tree import modules_of, named_units, unit_of, units_below, walk
from fairshard.engine.unit import Unit
from fairshard.errors import FairshardError, RanksDisagreeError
from fairshard.params.gathered import KeptPart
from fairshard.setup.changes import adopt_all_changes, connect
from fairshard.setup.origin import place
from fairshard.setup.placement import check_host_memory, compute_device
from fairshard.utils.collectives import Communicator, Communicators
from fairshard.utils.graph_breaks import untraced
from fairshard.utils.groups import on_host, part_of
from fairshard.utils.streams import is_asynchronous


@untraced
def claim(module: nn.Module) -> Root:
    """Make ``module``, which is in no model yet, the outermost of all units below it. **Collective.**

    Units that were in another model leave it. Sets up the groups' communicators and compares the units across ranks.

    Raises:
        TrainingStateError: a pass is running in the model that a unit was in before.
        FairshardError: parameters have no memory, or were added or replaced; if only on some ranks, a
            `RanksDisagreeError` on all.
    """
    parts = list(walk(module))
    found = named_units(parts)
    units = [unit for _, unit in found]
    before = dict.fromkeys(unit.root for unit in units if unit.root is not None)
    for old in before:
        assert_idle(old, "forward of an outer unit")
    for fqn, unit in found:
        unpin(unit)
        place(unit, fqn)
    refused = None
    try:
        adopt_all_changes(module, units)
    except FairshardError as error:
        refused = error  # raised after the ranks have compared their models, because it may concern this rank alone
    _check_settings(units)
    comms = {unit: unit.groups.communicators() for unit in units}
    for unit in units:
        connect(unit)
    if not hasattr(type(module), "_fairshard_class"):  # modules of `fully_shard` may be on different meshes
        _check_pairs(units)
    device = compute_device(units)
    if refused is not None and device.type == "meta":
        raise refused
    for unit in units:
        unit.groups.forget_loads()
    # The outermost unit's groups, which join the most ranks, are last: they pass on what inner ones have found.
    shared = [comm for own in reversed(dict.fromkeys(comms.values())) for comm in (own.shard, own.replicas)]
    distinct = list(dict.fromkeys(comm for comm in shared if comm is not None))
    _check_agreement(comms, distinct, device, refused)
    first = comms[units[0]]
    check_host_memory(first.replicas if first.shard.world_size == 1 and first.replicas else first.shard, units, device)
    for comm in distinct:
        if comm.peers:
            on_host(comm)
    root = Root(
        next((comm for comm in reversed(distinct) if comm.world_size > 1), distinct[-1]).new_id(),
        units,
        Shared(device, units[0].config.bucket_cap_mb),
        distinct,
        units[0].origin.observers(units, distinct),
    )
    own_modules: dict[Unit, list[nn.Module]] = {unit: [] for unit in units}
    for _, part in parts:
        if (owner := unit_of(part)) is not None:
            own_modules[owner] += modules_of(part)
    with all_or_none(units):
        for unit in units:
            for flat_param in unit.flat_params:
                flat_param.adopt_assigned()
                unit.config.check_param_dtype(flat_param.shard.dtype, flat_param.name)  # the user may call `.half()`
            unit.materialize(root, root.shared, comms[unit], own_modules[unit])
            for join_gathers in {flat_param.line.join_gathers for flat_param in unit.flat_params}:
                join_gathers(unit.flat_params)
            among = part_of(comms[unit].shard, unit.config.reshard_after_forward, unit.fqn)
            if among is not None:
                unit.parts = [KeptPart(each.gathered.kept_line, among) for each in unit.flat_params]
                for flat_param, kept in zip(unit.flat_params, unit.parts, strict=True):
                    flat_param.part = kept
        if is_asynchronous(device):
            memory = [flat_param.gathered for unit in units for flat_param in unit.flat_params]
            for copy_beside_gathers in {each.copy_beside_gathers for each in memory}:
                copy_beside_gathers(memory, device, root.shared.unshard_stream)
    _move_passes(before, root)
    return root


def _move_passes(before: Iterable[Root], root: Root) -> None:
    """Let ``root`` keep the passes that models ``before`` have begun at units which have joined it."""
    joined = [one for old in before for one in old.record.passes if one.calls[0].unit.root is root]
    for old in before:
        old.record.passes = [one for one in old.record.passes if one not in joined]
    for one in sorted(joined, key=attrgetter("place")):
        root.record.add(one, one.place)


def check_place(module: nn.Module, root: Root, called: Unit) -> None:
    """Check where ``called``, the unit of ``module`` in the model of ``root``, is when a pass begins with it.

    Raises:
        ValueError: a unit in ``module`` has joined another model since; or ``called`` is in a DistributedDataParallel,
            now in its forward, over ranks that share a unit, which would average different parts of the parameters.
    """
    gone = next((unit for unit in root.units if unit.root is not root), None)
    if gone is not None and any(unit is gone for _, unit in units_below(module)):
        raise ValueError(
            f"A unit must belong to one model, but unit `{gone.fqn or 'root'}` of this model has joined another one, "
            "which was called since. Wrap a module around both models and call that, so that one backward reduces the "
            "gradients of both; or make both ignore the shared part (`ignored_modules`, or `ignored_params` of "
            "fully_shard), which every rank then keeps whole."
        )
    ddp: Any = getattr(DistributedDataParallel, "_active_ddp_module", None)
    units = [] if ddp is None else [unit for _, unit in units_below(ddp.module)]
    for unit in units if called in units else ():
        group, ranks = unit.groups.shard.group, dist.get_process_group_ranks(ddp.process_group)
        shared = [] if group is None else sorted({*ranks}.intersection(dist.get_process_group_ranks(group)))
        if len(shared) > 1:
            raise ValueError(
                "DistributedDataParallel must be given other ranks than those that a unit is sharded over, but unit "
                f"`{unit.fqn or 'root'}` is sharded over its ranks {shared}: it averages different parts of the "
                "parameters. Leave DistributedDataParallel out, because gradients of shards are averaged already. For "
                "replicas of a sharded model, use hybrid sharding."
            )


def _check_settings(units: Sequence[Unit]) -> None:
    """Raise unless the options of the whole model are equal in all of ``units``, outermost first.

    Raises:
        ValueError: an inner unit has a different ``order_check`` or ``nan_check``.
    """
    outer = units[0]
    for unit, name in product(units, ("order_check", "nan_check")):
        wanted, found = getattr(outer.config, name), getattr(unit.config, name)
        if found != wanted:
            raise ValueError(
                f"`{name}` must be the same in all wrappers of a model, but is {found!r} in unit `{unit.fqn}` and "
                f"{wanted!r} in `{outer.fqn or 'root'}`, the outermost. Pass the same value to both."
            )


def _check_pairs(units: Sequence[Unit]) -> None:
    """Check that if one of ``units``, the outermost first, is hybrid, all are hybrid over the same pair of groups.

    Raises:
        ValueError: the pairs differ; names two units.
    """
    wanted = units[0].groups.spanning()
    for unit in units if any(unit.groups.is_pair for unit in units) else ():
        own = unit.groups.spanning()
        ranks = [list(map(dist.get_process_group_ranks, each)) for each in (own, wanted)]
        if own != wanted:
            raise ValueError(
                f"If one unit of a model uses hybrid sharding, all units must share its pair of groups, but those of "
                f"`{unit.fqn}` have the ranks {ranks[0]}, and those of `{units[0].fqn or 'root'}` {ranks[1]}. Pass the "
                "same `process_group` tuple, or the same `device_mesh`, to both (two calls of `init_device_mesh` make "
                "different groups); modules of `fully_shard` may differ in `mesh`."
            )


def _check_agreement(
    comms: dict[Unit, Communicators], distinct: list[Communicator], device: torch.device, refused: Exception | None
) -> None:
    """Compare units across the ranks of their groups, and raise on all ranks if any differ. **Collective.**"""
    found: Exception | None = None
    for own in dict.fromkeys(comms.values()):
        for comm in (own.shard, own.replicas):
            if comm is not None:
                try:
                    check_agreement(comm, [unit for unit, groups in comms.items() if groups == own], device, refused)
                except RanksDisagreeError as error:
                    found = found or error
    raise_together(distinct if len(distinct) > 1 else (), found or refused)


def roots_below(module: nn.Module) -> list[Root]:
    """The root of every model in ``module``, outermost first; claims units without a root (**collective**).

    Units that show whole parameters between passes show shards from now on.
    """
    roots: dict[Root, None] = {}
    for _, part in walk(module):
        unit = unit_of(part)
        if unit is not None:
            if unit.is_pinned and not unit.open_calls:
                unpin(unit)
            roots[unit.root or claim(part)] = None
    return list(roots)


@contextmanager
def all_or_none(units: Iterable[Unit]) -> Iterator[None]:
    """If the block raises, remove all ``units`` from their root; otherwise the next call would run half a model."""
    try:
        yield
    except BaseException:
        for unit in units:
            unit.root = None
        raise
