"""Cuts the parameters of a module that no inner unit owns into flat params."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fairshard.engine.tree import unit_of
from fairshard.params.dtensor_slot import DTensorSlot, new_slot
from fairshard.params.extended_slot import ExtendedSlot
from fairshard.params.flat_param import FlatParam
from fairshard.params.placeholder import ShardedParameter
from fairshard.params.shown import ShownShard
from fairshard.params.slot import ParamSlot, slot_of
from fairshard.settings.check import require
from fairshard.settings.config import UnitConfig
from fairshard.settings.groups import UnitGroups
from fairshard.settings.mesh import DataMesh
from fairshard.settings.placements import Owned, RowBlocks
from fairshard.setup.guard import guard_modules, guard_of
from fairshard.setup.lines import PlacementFn, lines_of, placed_lines
from fairshard.setup.origin import Ignored, Origin
from fairshard.setup.survey import Survey
from fairshard.utils.names import join
from fairshard.utils.storage import set_data
from fairshard.utils.subclasses import POST, PRE, check_extended, is_extended, is_wrapper, refuse_wrapper
from fairshard.views.copied_out import AlignedLine
from fairshard.views.extended_param import ExtendedParam, ShownExtended
from fairshard.views.ragged import ragged_line
from fairshard.views.shown_dtensors import ShownDTensors, ShownPlaced, ShownRagged
from fairshard.views.shown_runs import ShownRuns, ShownWhole

_OTHER_ENGINES = (
    "torch.distributed.fsdp",
    "torch.distributed._composable.fsdp",
    "torch.nn.parallel.distributed",
    "fairscale.nn.data_parallel",
    "deepspeed.runtime",
    "fairshard.nn.flatten_params_wrapper",
)


def shard_parameters(
    survey: Survey,
    config: UnitConfig,
    groups: UnitGroups,
    origin: Origin,
    placement: PlacementFn | None,
) -> list[FlatParam]:
    """Cut all parameters that are neither in inner units nor in ``origin.ignored``; the originals become empty leaves.

    Parameters are cut where they are: only the shard of a CPU parameter is copied to ``origin.device``.

    No communication: every rank cuts its span out of the values it holds. A parameter with several names occurs once.
    Parameters for which ``placement`` returns a `RowBlocks` or an `Owned` have lines of their own.

    Raises:
        TypeError: a parameter's dtype cannot be sharded, or ``placement`` returned something else.
        ValueError: a parameter is sharded already, or shared with an inner unit.
    """
    slots = _slots_in(survey, origin)
    for slot in slots:
        config.check_param_dtype(slot.leaf.dtype, slot.fqn)
    flat_params: list[FlatParam] = []
    rank, world_size = groups.shard.rank, groups.shard.world_size
    lines = [placed_lines(group, placement, world_size, groups.loads) for group in group_slots(slots, config)]
    for placed in chain(*lines):
        group = placed.slots
        name = f"flat_param_{len(flat_params)}" if config.flatten_parameters else group[0].fqn
        shapes = [slot.shape for slot in group]
        line = AlignedLine.among(shapes, rank, world_size)
        line = line if placed.layout is None else ragged_line(shapes, rank, placed.layout)
        kind = _kind_of(config, world_size)
        flat_param = FlatParam(kind(group, line, config.master_on_cpu), name)
        if kind is ShownShard:
            for slot in group:
                slot.register(None if config.flatten_parameters else flat_param.shard)
        for slot in group:
            slot.move_to(origin.device)
            if slot.placeholder is not None:
                dtype = None if slot.keeps_dtype else config.compute_dtype
                slot.placeholder.explain(flat_param.shard, slot.leaf, dtype)
        if not flat_param.shows.on_cpu:
            flat_param.shows.move_to(origin.device)
        flat_params.append(flat_param)
    guard_modules(flat_params)
    origin.note_cut(flat_params)
    return flat_params


def _slots_in(survey: Survey, origin: Origin) -> list[ParamSlot]:
    """The parameters of ``survey`` that no inner unit has; inner units get the names that they have there."""
    survey.place_units()  # messages name their parameters
    return collect_slots(survey.parts, survey.flat_params, origin.ignored.ids)


def _kind_of(config: UnitConfig, world_size: int) -> type[ShownShard]:
    """How the parameters of a unit on ``world_size`` ranks are registered."""
    if config.flatten_parameters and not config.use_orig_params:
        return ShownShard
    if world_size == 1 and not config.precision.keep_low_precision_grads:
        return ShownWhole
    return ShownRuns if config.use_orig_params else ShownShard


def shard_rows(
    survey: Survey,
    config: UnitConfig,
    groups: UnitGroups,
    data: DataMesh,
    origin: Origin,
    placement_of: Callable[[ParamSlot], int | RowBlocks | Owned],
    policy: Any,
) -> list[FlatParam]:
    """Like `shard_parameters`, but cuts each parameter as ``placement_of(slot)`` says, over the ranks of ``data``.

    An integer is the dimension to cut. Parameters placed by blocks share lines, whose cuts fall between blocks, and so
    do those that have owners. A parameter without dimensions stays whole on every rank.
    A tensor subclass that defines what is gathered is told the user's mixed precision ``policy``.

    Raises:
        TypeError, ValueError: see `shard_parameters`.
    """
    slots = _slots_in(survey, origin)
    dims: dict[ParamSlot, int | None] = {}
    ragged: dict[ParamSlot, RowBlocks | Owned] = {}
    for slot in slots:
        config.check_param_dtype(slot.leaf.dtype, slot.fqn)
        placement = placement_of(slot) if slot.shape else None
        if isinstance(placement, (RowBlocks, Owned)):
            _check_plain(slot, placement)
            ragged[slot] = placement
        else:
            dims[slot] = placement
    extended = [slot for slot in slots if is_extended(slot.leaf)]
    for slot in extended:
        _check_extended(slot, dims[slot], config, data.mesh)
    flat_params: list[FlatParam] = []
    for group in group_slots([slot for slot in slots if slot not in extended], config):
        for slot in group:
            if not slot.leaf.is_meta and not isinstance(slot, DTensorSlot):
                set_data(slot.leaf, slot.leaf.data.to(origin.device))
        even = [slot for slot in group if slot in dims]
        if even:
            shown = _shown(even, data, [dims[slot] for slot in even], config.master_on_cpu)
            flat_params.append(FlatParam(shown, shown.slots[0].fqn))
        places = {slot: ragged[slot] for slot in group if slot in ragged}
        for line in lines_of(places, data.num_shards, groups.loads):
            assert line.layout is not None
            unequal = ShownRagged(line.slots, data.mesh, line.layout, config.master_on_cpu)
            flat_params.append(FlatParam(unequal, unequal.slots[0].fqn))
        for slot in group:
            if not slot.leaf.is_meta:
                slot.move_to(origin.device)
    for slot in extended:
        extends = ShownExtended(ExtendedSlot(slot), data.mesh, config.master_on_cpu, origin.device)
        flat_params.append(ExtendedParam(extends, extends.slots[0].fqn, policy))
    guard_modules(flat_params)
    origin.note_cut(flat_params)
    return flat_params


def _shown(slots: list[ParamSlot], data: DataMesh, dims: list[int | None], on_cpu: bool) -> ShownDTensors:
    placed = [slot for slot in slots if isinstance(slot, DTensorSlot)]
    if placed:
        return ShownPlaced(placed, data, dims, on_cpu)
    return ShownDTensors(slots, data.mesh, dims, on_cpu)


def _check_plain(slot: ParamSlot, placement: RowBlocks | Owned) -> None:
    """Check that a parameter can be placed by blocks, or on one rank."""
    is_dtensor = isinstance(slot, DTensorSlot)
    require(
        not is_dtensor and not is_extended(slot.leaf),
        f"A parameter placed by {type(placement).__name__} must be a plain tensor, but `{slot.fqn}`, a "
        f"{type(slot.leaf).__name__}, {'is a DTensor already' if is_dtensor else 'defines what is gathered'}. Return "
        "None from `shard_placement_fn` for it.",
    )


def _check_extended(slot: ParamSlot, dim: int | None, config: UnitConfig, mesh: DeviceMesh) -> None:
    """Check that a parameter whose class defines what is gathered can be sharded as asked."""
    check_extended(slot.leaf, slot.fqn)
    what = f"`{slot.fqn}`, a {type(slot.leaf).__name__}, which defines what is gathered,"
    require(
        dim is not None and (not dim or mesh.size(mesh.ndim - 1) == 1),
        f"A tensor subclass with `{PRE}` must be sharded along its first dimension, but {what} has shape "
        f"{tuple(slot.shape)} and would be cut along {dim}. Return None from `shard_placement_fn` for it.",
    )
    require(
        isinstance(config.reshard_after_forward, bool),
        f"`reshard_after_forward` must be True or False for a tensor subclass with `{PRE}`, but is "
        f"{config.reshard_after_forward} for the unit of {what} because its gathered form cannot be cut again. Pass "
        "True or False.",
    )


def group_slots(slots: list[ParamSlot], config: UnitConfig) -> list[list[ParamSlot]]:
    """Group the parameters of a unit by flat param, in order; without ``flatten_parameters`` each has its own."""
    if not config.flatten_parameters:
        return [[slot] for slot in slots]
    by_kind: dict[tuple[object, ...], list[ParamSlot]] = {}
    for slot in slots:
        leaf = slot.leaf
        keeps_dtype = config.precision.param_dtype is not None and slot.keeps_dtype
        is_dtensor = isinstance(slot, DTensorSlot)
        by_kind.setdefault((leaf.dtype, leaf.device, leaf.requires_grad, keeps_dtype, is_dtensor), []).append(slot)
    return list(by_kind.values())


def collect_slots(
    parts: Iterable[tuple[str, nn.Module]],
    inner: Sequence[FlatParam] = (),
    skip: Collection[int] = (),
) -> list[ParamSlot]:
    """The parameters of ``parts``, modules with their fqns; each parameter once, with all its names.

    Leaves out parameters of ``inner`` units, and those whose ``id`` is in ``skip``.

    Raises:
        ValueError: a parameter is sharded already, shared with another unit, or shares memory with another one.
    """
    left_out = {id(stepped.shard) for flat_param in inner for stepped in flat_param.stepped} | set(skip)
    leaves = {id(slot.leaf) for flat_param in inner for slot in flat_param.slots}
    slots: dict[int, ParamSlot] = {}
    for fqn, part in parts:
        for name, param in part._parameters.items():
            if param is None or id(param) in left_out:
                continue
            full_name, other = join(fqn, name), slot_of(param)
            if other is not None:
                is_outer = (part, name) in other.owners and id(param) not in leaves
                raise ValueError(_outer_first(other.fqn) if is_outer else _of_two_units(full_name, other))
            slots.setdefault(id(param), new_slot(param, full_name)).owners.append((part, name))
    found = list(slots.values())
    _check_memory(found)
    return found


def check_not_sharded(survey: Survey, ignored: Ignored, data: DataMesh | None = None) -> None:
    """Raise if another engine has sharded something in ``survey`` that is not ``ignored``, or a parameter is lazy.

    All units must come from `fully_shard`, which passes its ``data``, or all from the wrapper.

    Raises:
        ValueError: there is one; the message names it.
    """
    for fqn, unit in survey.units:
        require(
            (unit.members is None) == (data is None),
            "A model must be sharded by `fully_shard` or by FullyShardedDataParallel, not by both, but "
            f"`{fqn or 'root'}` in this {type(survey.module).__name__} was sharded by the other one. Use one of the "
            "two throughout.",
        )
    registered = {id(own) for flat_param in survey.flat_params for own in flat_param.shows.registered}
    inner = {id(owner) for slot in survey.slots for owner, _ in slot.owners}
    skipped = ignored.ids | registered
    for fqn, part in survey.parts:
        if id(part) not in skipped:
            _check_module(fqn, part)
            taken = None if id(part) in inner else _sharded_param_of(part)
            if taken is not None:
                raise ValueError(_outer_first(taken))
        for name, param in part._parameters.items():
            is_plain = type(param) is nn.Parameter and not vars(param) and (data is None or data.whole is None)
            if param is not None and not is_plain and id(param) not in skipped:
                _check_param(param, join(fqn, name), data)


def _sharded_param_of(module: nn.Module) -> str | None:
    """The fqn of a parameter of ``module`` itself that a unit has sharded; otherwise None."""
    for shown in module.__dict__.values():
        if isinstance(shown, ShardedParameter):
            return shown.fqn
        slot = slot_of(shown) if isinstance(shown, nn.Parameter) else None
        if slot is not None:
            return slot.fqn
    guard = guard_of(module)
    return None if guard is None else next(iter(guard.slots.values())).fqn


def _of_two_units(fqn: str, owner: ParamSlot) -> str:
    how = (
        "Make the two modules one unit (`fully_shard([first, second])`), or call fully_shard on neither of them, so "
        "that the unit around both has the parameter."
        if isinstance(owner.registered, DTensor)
        else "Put one wrapper around both modules, or wrap neither of them, so that the wrapper around both has the "
        "parameter."
    )
    return (
        f"A parameter must belong to one unit, but `{fqn}` is shared with `{owner.fqn}` of a unit that is sharded "
        f"already. {how}"
    )


def _outer_first(fqn: str) -> str:
    return (
        f"Inner modules must be sharded before outer ones, but parameter `{fqn}` of this module has already been "
        "sharded by a unit around or beside it. Call fully_shard or FullyShardedDataParallel on inner modules first, "
        "before anything runs, on modules that share parameters together, and use one of the two throughout."
    )


def _check_param(param: Any, fqn: str, data: DataMesh | None) -> None:
    """Check that ``param`` has a shape, and is of a class that can be sharded, over ``data`` by `fully_shard`."""
    require(
        not is_lazy(param),
        f"Parameters must have shapes to be sharded, but `{fqn}` of a lazy module has none yet. Run a batch through "
        "the module first.",
    )
    is_dtensor = isinstance(param, DTensor)
    held = param._local_tensor if is_dtensor else param
    if is_wrapper(held) or is_extended(held):
        if held is not param:
            refuse_wrapper(held, fqn, "It is the local tensor of a DTensor: use a plain tensor there.")
        if data is None:
            refuse_wrapper(
                param,
                fqn,
                f"Shard the module with `fully_shard`, which supports classes with `{PRE}` and `{POST}`; convert the "
                "module after wrapping; or leave it out (`ignored_modules`).",
            )
        if not is_extended(param):
            refuse_wrapper(
                param,
                fqn,
                f"Add `{PRE}` and `{POST}` to the class (torchao's float8 weights have them with "
                "`enable_fsdp_float8_all_gather=True`), or name the parameter in `ignored_params`.",
            )
    require(
        data is not None or not is_dtensor,
        f"FullyShardedDataParallel must have whole parameters, but `{fqn}` is a DTensor, which a flat shard cannot "
        "hold. Shard the module with `fairshard.nn.fully_shard`, which accepts DTensors, or leave the parameter out "
        "(`ignored_parameters`).",
    )
    require(
        is_dtensor or data is None or data.whole is None,
        f"With `dp_mesh_dims` all parameters must be DTensors on `mesh`, but `{fqn}` is a plain tensor. Distribute the "
        "whole module (`distribute_module`), or leave `dp_mesh_dims` out and pass the data-parallel mesh.",
    )
    if data is not None and is_dtensor:
        data.check(param._spec, fqn)


def _check_module(fqn: str, module: nn.Module) -> None:
    if unit_of(module) is not None:  # sharded by `fully_shard`: its class derives from torch's FSDPModule too
        return
    for base in type(module).__mro__:
        if base.__module__.startswith(_OTHER_ENGINES):
            raise ValueError(
                f"A module must not be sharded twice, but `{fqn or type(module).__name__}` is wrapped by "
                f"{base.__module__}.{base.__name__}. Build the model again without that wrapper."
            )


def _check_memory(slots: Sequence[ParamSlot]) -> None:
    """Check that no trained parameter shares elements with another one, as after ``b.weight.data = a.weight.data``.

    Raises:
        ValueError: two do; the message names them.
    """
    last: ParamSlot | None = None
    stop = 0
    for slot in sorted(filter(_is_dense, slots), key=_start):
        if last is not None and _start(slot) < stop and (last.leaf.requires_grad or slot.leaf.requires_grad):
            raise ValueError(
                f"Parameters must have memory of their own, but `{slot.fqn}` shares that of `{last.fqn}`. Each would "
                "get its own shard, and they would differ after the first step. Tie the modules by one parameter "
                "(`b.weight = a.weight`), or copy it (`nn.Parameter(a.weight.detach().clone())`)."
            )
        if _start(slot) + slot.leaf.nbytes > stop:
            last, stop = slot, _start(slot) + slot.leaf.nbytes


def _start(slot: ParamSlot) -> int:
    return slot.leaf.data_ptr()


def _is_dense(slot: ParamSlot) -> bool:
    """Whether the parameter is plain, has memory, and fills a run of it."""
    leaf = slot.leaf
    if type(leaf) is not nn.Parameter or leaf.is_meta or not leaf.numel() or not leaf.untyped_storage().nbytes():
        return False
    return 1 + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True)) == leaf.numel()
