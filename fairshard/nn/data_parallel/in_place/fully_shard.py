"""``fully_shard`` shards a module in place, with PyTorch's names and defaults; parameters become DTensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, overload

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fairshard.checks.leaf_writes import unpin
from fairshard.checks.optimizer_check import watch_optimizers
from fairshard.engine.tree import UNIT_ATTRIBUTE, is_wrapper, modules_of, unit_of, units_below
from fairshard.engine.unit import Unit
from fairshard.nn.data_parallel.guards import in_place_keywords, lacks_forward
from fairshard.nn.data_parallel.in_place.loading import serve_state_dicts, watch_scalars
from fairshard.nn.data_parallel.in_place.module import FSDPModule, Members, sharded_class
from fairshard.nn.data_parallel.torch_state import mark_managed, register
from fairshard.params.slot import ParamSlot
from fairshard.settings.check import FUNCTION_OF_PARAMETER, require
from fairshard.settings.config import UnitConfig, resolve
from fairshard.settings.fsdp import (
    OFFLOAD_POLICY,
    PRECISION_POLICY,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    adopt,
)
from fairshard.settings.groups import find_groups
from fairshard.settings.mesh import DataMesh, DataParallelMeshDims, ShardPlacementResult, default_mesh
from fairshard.settings.placements import Owned, RowBlocks
from fairshard.settings.state_dicts import StateDictType, resolve_settings
from fairshard.setup.construction import make_ready, resolve_construction
from fairshard.setup.ignored import resolve_ignored
from fairshard.setup.lines import check_owner
from fairshard.setup.sharding import check_not_sharded, shard_rows
from fairshard.setup.survey import Survey
from fairshard.utils.device import current_device
from fairshard.utils.subclasses import check_dtensor_subclasses
from fairshard.utils.user_line import level_of_user

Placement = Callable[[nn.Parameter], Shard | RowBlocks | Owned | ShardPlacementResult | None]
_AS_IS, _ON_DEVICE = MixedPrecisionPolicy(), OffloadPolicy()


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Placement | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    bucket_cap_mb: float = ...,
    order_check: str = ...,
    nan_check: bool = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Placement | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    bucket_cap_mb: float = ...,
    order_check: str = ...,
    nan_check: bool = ...,
) -> list[FSDPModule]: ...


@in_place_keywords
def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Placement | None = None,
    mp_policy: MixedPrecisionPolicy = _AS_IS,
    offload_policy: OffloadPolicy = _ON_DEVICE,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    bucket_cap_mb: float = 25,
    order_check: str = "sampled",
    nan_check: bool = False,
) -> Any:
    """Shard ``module`` in place: parameters, gradients and optimizer state; returns ``module``.

    Each parameter becomes a DTensor under its own name, with some of its rows on each rank. Optimizers, gradient
    clipping, ``torch.distributed.checkpoint`` and its state dict functions work unchanged. Parameters are gathered
    before the module computes, and freed afterwards. Call ``fully_shard`` on inner modules first, and on the whole
    model last: an outer call shards every parameter that no inner call has sharded.

    >>> import torch
    >>> from fairshard.nn import fully_shard
    >>> model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
    >>> for layer in model:
    ...     _ = fully_shard(layer)
    >>> model = fully_shard(model)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    >>> model(torch.ones(4, 8)).mean().backward()
    >>> optimizer.step()

    Args:
        module: the module to shard. A list is one unit: gathered at the first call of any of its modules, freed when
            all of them have been called.
        mesh: 1-D: the ranks to shard over; 2-D: the first dimension holds replicas, the second shards. All ranks if
            None.
        reshard_after_forward: free the whole parameters between forward and backward. A divisor of the number of ranks
            keeps them sharded over that many ranks. None means False for the outermost module, and True for others.
        shard_placement_fn: maps a parameter to the dimension to shard, as a ``Shard``; None means the first dimension.
            The size of any other dimension must be divisible by the number of ranks. A ``RowBlocks`` cuts between
            blocks of rows only; ranks may have unequal numbers of them. An ``Owned`` puts all of it on one rank. A
            ``ShardPlacementResult`` also names other ranks: modules all of whose parameters are on other ranks become
            units of their own.
        mp_policy: dtypes of compute, gradients and outputs.
        offload_policy: whether shards, gradients and optimizer state are kept in host memory.
        ignored_params: parameters that are not sharded.
        dp_mesh_dims: the data-parallel dimensions of ``mesh``, if that is the mesh on which all parameters are
            DTensors already, replicated over these dimensions.
        bucket_cap_mb: gradients are collected up to this many MB (over all ranks) before they are reduced; 0
            reduces the gradients of each unit separately. The value of the outermost module applies.
        order_check: accepted (``"sampled"``, ``"always"``, ``"off"``); ranks are always compared at the start of each
            backward.
        nan_check: after each backward, raise on all ranks if a gradient is not finite, naming it and its rank.

    Raises:
        ValueError: there is no process group, the arguments contradict each other, or the module is already sharded
            or has no forward.
        TypeError: an argument has the wrong type, or a parameter has a dtype that cannot be sharded.

    Source: PyTorch's function of the same name; the algorithm is ZeRO-3, Rajbhandari et al. 2020.
    """
    modules = _modules_of(module)
    policy, offload = adopt(mp_policy), adopt(offload_policy)
    PRECISION_POLICY("mp_policy", policy)
    OFFLOAD_POLICY("offload_policy", offload)
    FUNCTION_OF_PARAMETER("shard_placement_fn", shard_placement_fn)
    data = DataMesh.of(default_mesh() if mesh is None else mesh, dp_mesh_dims)
    mesh = data.mesh
    config = _config(
        reshard_after_forward,
        data,
        mixed_precision=policy.precision,
        cpu_offload=isinstance(offload, CPUOffloadPolicy),
        bucket_cap_mb=bucket_cap_mb,
        order_check=order_check,
        nan_check=nan_check,
    )
    tree = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    for _, inner in units_below(tree):
        unpin(inner)
    if shard_placement_fn is not None:
        options = {"shard_placement_fn": shard_placement_fn, "mp_policy": mp_policy, "offload_policy": offload_policy}
        options |= {"reshard_after_forward": reshard_after_forward, "ignored_params": ignored_params}
        options |= {"bucket_cap_mb": bucket_cap_mb, "order_check": order_check, "nan_check": nan_check}
        for part, where in _modules_elsewhere(tree, shard_placement_fn, data).items():
            again: Any = fully_shard  # mypy finds no overload for keywords from a dict
            again(part, **options, **where)
    groups = find_groups(config.sharding_strategy, None, mesh, None)
    device = current_device() if mesh.device_type != "cpu" else None
    how = replace(resolve_construction(None, device, None, False), leaves_meta=True)
    survey = Survey(tree)
    ignored = resolve_ignored(survey, None, None, ignored_params, "ignored_params")
    check_not_sharded(survey, ignored, data)
    origin = make_ready(survey, how, ignored, groups.spanning())
    flat_params = shard_rows(survey, config, groups, data, origin, _placing(shard_placement_fn, data), mp_policy)
    unit = Unit(groups, flat_params, config, origin, Members(modules, policy.output_dtype))
    unit.state_dict_settings = resolve_settings(StateDictType.SHARDED_STATE_DICT, None, None)
    for member in modules:
        vars(member)[UNIT_ATTRIBUTE] = unit  # not setattr: a compiled module would set it on the module inside
        member.__class__ = sharded_class(type(member))
        register(member, unit)
        for managed in modules_of(member):
            mark_managed(managed)
        serve_state_dicts(unit, modules_of(member))
    watch_optimizers(flat_params, config)
    watch_scalars(param for flat_param in flat_params for param in flat_param.shows.registered)
    for inner in (unit, *(inner for _, inner in survey.units)):
        inner.is_inner = inner is not unit
    return module


def _modules_of(given: Any) -> list[nn.Module]:
    modules = list(given) if isinstance(given, (list, tuple)) else [given]
    require(modules, "`module` must be a module or a list of modules, but the list is empty.")
    for module in modules:
        name = type(module).__name__
        require(
            isinstance(module, nn.Module),
            f"`module` must be an nn.Module or a list of them, but holds an object of type {name}.",
            TypeError,
        )
        require(
            unit_of(module) is None,
            f"A module must not be sharded twice, but this {name} has been sharded already "
            f"{'by FullyShardedDataParallel' if is_wrapper(module) else 'by fully_shard'}. Leave this call out, and "
            "use one of the two throughout.",
        )
        require(
            not lacks_forward(module),
            f"A sharded module must have a forward, but a {name} has none. Call fully_shard on the modules in it, or "
            "on `list(...)` of them to make them one unit.",
        )
    require(len(set(map(id, modules))) == len(modules), "`module` must hold each module once, but holds one twice.")
    return modules


def _config(reshard: Any, data: DataMesh, **settings: Any) -> UnitConfig:
    num_ranks, is_number = data.num_shards, isinstance(reshard, int) and not isinstance(reshard, bool)
    require(
        reshard is None or isinstance(reshard, int),
        f"`reshard_after_forward` must be True, False, None or a number of ranks, but is {reshard!r}.",
    )
    require(
        data.whole is None or not is_number,
        f"`reshard_after_forward` must be a bool or None with `dp_mesh_dims`, but is {reshard}. Pass True, or leave "
        "`dp_mesh_dims` out and pass the data-parallel mesh.",
    )
    keeps_root = reshard is None
    reshard = True if reshard is None else reshard
    if is_number:
        require(
            0 < reshard <= num_ranks and not num_ranks % reshard,
            f"`reshard_after_forward` must be a bool or divide the number of ranks, {num_ranks}, but is {reshard}.",
        )
        if reshard == 1:
            warnings.warn(
                "`reshard_after_forward=1` keeps whole parameters on each rank, as False does. Pass False, or a "
                "larger number.",
                stacklevel=level_of_user(),
            )
        reshard = False if reshard == 1 else True if reshard == num_ranks else reshard
    strategy = None
    if not data.shards:
        strategy, reshard = ShardingStrategy.NO_SHARD, True
    elif data.replicates:
        strategy = ShardingStrategy.HYBRID_SHARD if reshard is not False else ShardingStrategy._HYBRID_SHARD_ZERO2
        reshard = True if reshard is False else reshard
    return resolve(
        reshard_after_forward=reshard,
        sharding_strategy=strategy,
        disable_reshard_on_root=keeps_root,
        keeps_across_passes=True,
        **settings,
    )


# ---- the answers of ``shard_placement_fn``


def _placing(placement: Placement | None, data: DataMesh) -> Callable[[ParamSlot], int | RowBlocks | Owned]:
    """A function that returns how parameters are cut over the ranks of ``data``, or a dimension."""
    num_ranks = data.num_shards

    def placement_of(slot: ParamSlot) -> int | RowBlocks | Owned:
        found: Any = None if placement is None else placement(slot.leaf)
        if found is not None and _elsewhere(found) is not None:
            require(
                _mesh_of(found) == data.mesh,
                f"Parameters of one module must be sharded over the same ranks, but `shard_placement_fn` returned "
                f"{_mesh_of(found)} for `{slot.fqn}`, whose module also has parameters on {data.mesh}. Put them into a "
                "submodule with a forward of its own.",
            )
            found = found.placement
        if found is None:
            return 0
        if isinstance(found, Owned):
            check_owner(found, slot.fqn, num_ranks)
        if isinstance(found, (RowBlocks, Owned)):
            check_dtensor_subclasses(slot.fqn)
            return found
        require(
            isinstance(found, Shard),
            "`shard_placement_fn` must return a torch.distributed.tensor.Shard, a fairshard.nn.RowBlocks or Owned, a "
            f"ShardPlacementResult or None, but returned {type(found).__name__} ({found!r}) for `{slot.fqn}`.",
            TypeError,
        )
        shape = tuple(slot.shape)
        require(
            -len(shape) <= found.dim < len(shape),
            f"`shard_placement_fn` must name a dimension of the parameter, but returned {found!r} for `{slot.fqn}`, "
            f"which has shape {shape}.",
        )
        dim: int = found.dim % len(shape)
        require(
            not dim or not shape[dim] % num_ranks,
            f"A dimension other than the first must be cut evenly, but {num_ranks} ranks do not divide dimension {dim} "
            f"of `{slot.fqn}`, which has shape {shape}. Return None from `shard_placement_fn` for it.",
        )
        return dim

    return placement_of


def _modules_elsewhere(module: nn.Module, placement: Placement, data: DataMesh) -> dict[nn.Module, dict[str, Any]]:
    """The outermost modules in ``module`` whose parameters are all sharded over the same ranks, but not of ``data``.

    Returns ``mesh`` and ``dp_mesh_dims`` of each, as for `fully_shard`. Modules sharded already are left out.
    """
    found: dict[nn.Module, dict[str, Any]] = {}
    for child in module.children():
        if unit_of(child) is not None:
            continue
        answers = [placement(param) for param in child.parameters()]
        info = _elsewhere(answers[0]) if answers else None
        meshes = [_mesh_of(answer) for answer in answers]
        if info is None or meshes[0] == data.mesh or any(mesh != meshes[0] for mesh in meshes):
            found.update(_modules_elsewhere(child, placement, data))
        else:
            dims = getattr(info, "dp_mesh_dims", None)
            found[child] = {"mesh": meshes[0] if dims is None else info.spmd_mesh, "dp_mesh_dims": dims}
    return found


def _elsewhere(found: Any) -> Any:
    """The mesh, or its description, that a parameter is sharded over; None: that of its unit."""
    return getattr(found, "mesh_info", None)


def _mesh_of(found: Any) -> DeviceMesh | None:
    info = _elsewhere(found)
    return info if isinstance(info, DeviceMesh) else getattr(info, "mesh", None)
