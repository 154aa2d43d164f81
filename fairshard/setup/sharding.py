"""Cuts the parameters of a module that no inner unit owns into flat params."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fairshard.engine.origin import Ignored, Origin
from fairshard.engine.tree import unit_of, units_below, walk
from fairshard.params.flat_param import FlatParam
from fairshard.params.line import FlatLine
from fairshard.params.shown import ShownShard
from fairshard.params.slot import ParamSlot, sharded_param_of, slot_of
from fairshard.settings.config import UnitConfig, check_param_dtype
from fairshard.setup.shared_params import SharedParams, refusal
from fairshard.utils.names import join
from fairshard.views.shown_dtensors import ShownDTensors
from fairshard.views.shown_runs import ShownRuns

_OTHER_ENGINES = (
    "torch.distributed.fsdp",
    "torch.distributed._composable.fsdp",
    "fairscale.nn.data_parallel",
    "deepspeed.runtime",
    "fairshard.nn.flatten_params_wrapper",
)


def shard_parameters(
    module: nn.Module, config: UnitConfig, rank: int, world_size: int, origin: Origin
) -> list[FlatParam]:
    """Cut all parameters that are neither in inner units nor in ``origin.ignored``; the originals become empty leaves.

    Parameters are cut where they are: only the shard of a CPU parameter is copied to ``origin.device``.

    No communication: every rank cuts its span out of the values it holds. A parameter with several names occurs once.

    Raises:
        TypeError: a parameter's dtype cannot be sharded.
        ValueError: a parameter is sharded already, or shared with an inner unit.
    """
    inner = [flat_param for _, unit in units_below(module) for flat_param in unit.flat_params]
    slots = collect_slots(walk(module), inner, origin.ignored.ids, origin.shared)
    for slot in slots:
        check_param_dtype(config, slot.leaf.dtype, slot.fqn)
    flat_params = []
    for index, group in enumerate(group_slots(slots, config)):
        name = f"flat_param_{index}" if config.flatten_parameters else group[0].fqn
        line = FlatLine.among([slot.shape for slot in group], rank, world_size)
        shown = (ShownRuns if config.use_orig_params else ShownShard)(group, line, config.master_on_cpu)
        flat_param = FlatParam(shown, name)
        if not config.use_orig_params:
            for slot in group:
                slot.register(None if config.flatten_parameters else flat_param.shard)
        for slot in group:
            slot.move_to(origin.device)
            if config.flatten_parameters and not config.use_orig_params:
                slot.explain(flat_param.shard, config.compute_dtype)
        if not flat_param.on_cpu:
            flat_param.move_to(origin.device)
        flat_params.append(flat_param)
    origin.note_cut(flat_params)
    return flat_params


def shard_rows(
    module: nn.Module, config: UnitConfig, mesh: DeviceMesh, origin: Origin, dim_of: Callable[[ParamSlot], int]
) -> list[FlatParam]:
    """Like `shard_parameters`, but cuts each parameter alone, along ``dim_of(slot)``, over the last dim of ``mesh``.

    A parameter without dimensions stays whole on every rank.

    Raises:
        TypeError, ValueError: see `shard_parameters`.
    """
    inner = [flat_param for _, unit in units_below(module) for flat_param in unit.flat_params]
    slots = collect_slots(walk(module), inner, origin.ignored.ids, origin.shared)
    dims: dict[ParamSlot, int | None] = {}
    for slot in slots:
        check_param_dtype(config, slot.leaf.dtype, slot.fqn)
        dims[slot] = dim_of(slot) if slot.shape else None
    flat_params: list[FlatParam] = []
    for index, group in enumerate(group_slots(slots, config)):
        for slot in group:
            if not slot.leaf.is_meta:
                slot.leaf.data = slot.leaf.data.to(origin.device)
        own_dims = [dims[slot] for slot in group]
        shown = ShownDTensors(group, mesh, own_dims, config.master_on_cpu)
        flat_params.append(FlatParam(shown, f"flat_param_{index}"))
        for slot in group:
            if not slot.leaf.is_meta:
                slot.move_to(origin.device)
    origin.note_cut(flat_params)
    return flat_params


def group_slots(slots: list[ParamSlot], config: UnitConfig) -> list[list[ParamSlot]]:
    """Group the parameters of a unit by flat param, in order; without ``flatten_parameters`` each has its own."""
    if not config.flatten_parameters:
        return [[slot] for slot in slots]
    by_kind: dict[tuple[object, ...], list[ParamSlot]] = {}
    for slot in slots:
        leaf = slot.leaf
        keeps_dtype = config.precision.param_dtype is not None and slot.keeps_dtype
        by_kind.setdefault((leaf.dtype, leaf.device, leaf.requires_grad, keeps_dtype), []).append(slot)
    return list(by_kind.values())


def collect_slots(
    parts: Iterable[tuple[str, nn.Module]],
    inner: Sequence[FlatParam] = (),
    skip: Collection[int] = (),
    shared: SharedParams | None = None,
) -> list[ParamSlot]:
    """The parameters of ``parts``, modules with their fqns; each parameter once, with all its names.

    Leaves out parameters of ``inner`` units, and those whose ``id`` is in ``skip``. Records in ``shared`` the
    parameters that units outside these modules have sharded.

    Raises:
        ValueError: a parameter is sharded already, or shared with an inner unit.
    """
    left_out = {id(stepped.shard) for flat_param in inner for stepped in flat_param.stepped} | set(skip)
    leaves = {id(slot.leaf) for flat_param in inner for slot in flat_param.slots}
    slots: dict[int, ParamSlot] = {}
    for fqn, part in parts:
        for name, param in part._parameters.items():
            if param is None or id(param) in left_out:
                continue
            full_name = join(fqn, name)
            other = slot_of(param)
            if other is not None:
                if shared is None or id(param) in leaves:
                    raise ValueError(refusal(full_name, other.fqn))
                shared.note(other, part, name, full_name)
                continue
            slots.setdefault(id(param), ParamSlot(param, full_name)).add_owner(part, name)
    return list(slots.values())


def check_not_sharded(module: nn.Module, ignored: Ignored, in_place: bool = False) -> None:
    """Raise if another engine has sharded something in ``module`` that is not ``ignored``, or a parameter is lazy.

    All units in ``module`` must come from `fully_shard` (``in_place``), or all from the wrapper.

    Raises:
        ValueError: there is one; the message names it.
    """
    skipped, inner = ignored.ids, set[int]()
    for fqn, unit in units_below(module):
        if (unit.members is not None) != in_place:
            raise ValueError(
                f"A model must be sharded by `fully_shard` or by FullyShardedDataParallel, not by both, but `{fqn}` in "
                f"this {type(module).__name__} was sharded by the other one. Use one of the two throughout."
            )
        slots = [slot for flat_param in unit.flat_params for slot in flat_param.slots]
        skipped |= {id(own) for flat_param in unit.flat_params for own in flat_param.registered}
        inner |= {id(owner) for slot in slots for owner, _ in slot.owners}
    for fqn, part in walk(module):
        if id(part) not in skipped:
            _check_module(fqn, part)
            taken = None if id(part) in inner else sharded_param_of(part)
            if taken is not None:
                raise ValueError(
                    f"Inner modules must be sharded before outer ones, but parameter `{taken}` of this module has "
                    "already been sharded by a unit around or beside it. Call fully_shard or FullyShardedDataParallel "
                    "on inner modules first, on modules that share parameters together, and use one of the two "
                    "throughout."
                )
        for name, param in part._parameters.items():
            if param is not None and is_lazy(param) and id(param) not in skipped:
                raise ValueError(
                    f"Parameters must have shapes to be sharded, but `{join(fqn, name)}` of a lazy module has none "
                    "yet. Run a batch through the module first."
                )
            if isinstance(param, DTensor) and id(param) not in skipped:
                raise ValueError(
                    f"Parameters must be whole to be sharded, but `{join(fqn, name)}` is a DTensor. Wrap the module "
                    "before distributing it, or leave it out of this unit."
                )


def _check_module(fqn: str, module: nn.Module) -> None:
    if unit_of(module) is not None:  # sharded by `fully_shard`: its class derives from torch's FSDPModule too
        return
    for base in type(module).__mro__:
        if base.__module__.startswith(_OTHER_ENGINES):
            raise ValueError(
                f"A module must not be sharded twice, but `{fqn or type(module).__name__}` is wrapped by "
                f"{base.__module__}.{base.__name__}. Build the model again without that wrapper."
            )
