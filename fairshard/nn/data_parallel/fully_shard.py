"""``fully_shard`` shards a module in place, with PyTorch's names and defaults; parameters become DTensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, overload

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fairshard.checks.optimizer_check import watch_optimizers
from fairshard.engine.members import Members
from fairshard.engine.tree import UNIT_ATTRIBUTE, is_wrapper, modules_of, unit_of, units_below
from fairshard.engine.unit import Unit
from fairshard.nn.data_parallel.in_place.loading import accept_whole_values, watch_scalars
from fairshard.nn.data_parallel.in_place.module import FSDPModule, sharded_class
from fairshard.nn.data_parallel.in_place.registration import watch_registrations
from fairshard.nn.data_parallel.torch_state import mark_managed, register
from fairshard.params.slot import ParamSlot
from fairshard.settings.config import LateOptions, UnitConfig
from fairshard.settings.fsdp1 import ShardingStrategy
from fairshard.settings.fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, adopt_policy
from fairshard.settings.groups import find_groups
from fairshard.settings.mesh import check_mesh, default_mesh
from fairshard.settings.resolve import resolve
from fairshard.settings.state_dicts import StateDictType, resolve_settings
from fairshard.setup.construction import make_ready, resolve_construction
from fairshard.setup.ignored import resolve_ignored
from fairshard.setup.sharding import check_not_sharded, shard_rows
from fairshard.utils.device import current_device

Placement = Callable[[nn.Parameter], Shard | None]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
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
    dp_mesh_dims: None = ...,
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
    dp_mesh_dims: None = ...,
    bucket_cap_mb: float = ...,
    order_check: str = ...,
    nan_check: bool = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Placement | None = None,
    mp_policy: MixedPrecisionPolicy = _AS_IS,
    offload_policy: OffloadPolicy = _ON_DEVICE,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: None = None,
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
            The size of any other dimension must be divisible by the number of ranks.
        mp_policy: dtypes of compute, gradients and outputs.
        offload_policy: whether shards, gradients and optimizer state are kept in host memory.
        ignored_params: parameters that are not sharded.
        dp_mesh_dims: must be None: parameters that are already DTensors are not supported.
        bucket_cap_mb: gradients are collected up to this many MB (over all ranks) before they are reduced; 0 or less
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
    policy = adopt_policy("mp_policy", mp_policy, MixedPrecisionPolicy)
    offloads = isinstance(adopt_policy("offload_policy", offload_policy, OffloadPolicy), CPUOffloadPolicy)
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(f"`shard_placement_fn` must be a function of a parameter, but is {shard_placement_fn!r}.")
    if dp_mesh_dims is not None:
        raise ValueError(
            "`dp_mesh_dims` must be None: it is for parameters that are DTensors on a larger mesh, which are not "
            "supported. Pass the data-parallel part of the mesh as `mesh`."
        )
    mesh = default_mesh() if mesh is None else mesh
    check_mesh(mesh)
    num_ranks = mesh.size(mesh.ndim - 1)
    config = _config(
        reshard_after_forward,
        num_ranks,
        mixed_precision=policy.precision,
        cpu_offload=offloads,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD if mesh.ndim == 2 else None,
        bucket_cap_mb=bucket_cap_mb,
        order_check=order_check,
        nan_check=nan_check,
    )
    tree = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    groups = find_groups(config.sharding_strategy, None, mesh, None)
    device = current_device() if mesh.device_type == "cuda" else None
    how = replace(resolve_construction(None, device, None, False), leaves_meta=True)
    ignored = resolve_ignored(tree, None, None, ignored_params, "ignored_params")
    check_not_sharded(tree, ignored, in_place=True)
    origin = make_ready(tree, how, ignored, groups.spanning())
    flat_params = shard_rows(tree, config, mesh, origin, _placing(shard_placement_fn, num_ranks))
    unit = Unit(groups, flat_params, config, origin, Members(modules, policy.output_dtype))
    unit.state_dict_settings = resolve_settings(StateDictType.SHARDED_STATE_DICT, None, None)
    for member in modules:
        vars(member)[UNIT_ATTRIBUTE] = unit  # not setattr: a compiled module would set it on the module inside
        member.__class__ = sharded_class(type(member))
        register(member, unit)
        for managed in modules_of(member):
            mark_managed(managed)
        accept_whole_values(modules_of(member))
    watch_optimizers(flat_params, config)
    watch_scalars(param for flat_param in flat_params for param in flat_param.registered)
    watch_registrations()
    for fqn, inner in units_below(tree):
        inner.place(fqn)
        inner.is_inner = inner is not unit
    return module


def _modules_of(given: Any) -> list[nn.Module]:
    modules = list(given) if isinstance(given, (list, tuple)) else [given]
    if not modules:
        raise ValueError("`module` must be a module or a list of modules, but the list is empty.")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"`module` must be an nn.Module or a list of them, but holds a {type(module).__name__}.")
        if unit_of(module) is not None:
            how = "by FullyShardedDataParallel" if is_wrapper(module) else "already"
            raise ValueError(f"A module must not be sharded twice, but this {type(module).__name__} has been {how}.")
        if isinstance(module, _CONTAINERS) and type(module).forward is nn.Module.forward:
            raise ValueError(
                f"A sharded module must have a forward, but a {type(module).__name__} has none. "
                "Call fully_shard on the modules in it, or on `list(...)` of them to make them one unit."
            )
    if len(set(map(id, modules))) < len(modules):
        raise ValueError("`module` must hold each module once, but holds one more than once.")
    return modules


def _config(reshard: Any, num_ranks: int, **settings: Any) -> UnitConfig:
    if reshard is not None and not isinstance(reshard, int):
        raise ValueError(f"`reshard_after_forward` must be True, False, None or a number of ranks, but is {reshard!r}.")
    keeps_root = reshard is None
    reshard = True if reshard is None else reshard
    if not isinstance(reshard, bool):
        if not 0 < reshard <= num_ranks or num_ranks % reshard:
            raise ValueError(
                f"`reshard_after_forward` must be a bool or divide the number of ranks, {num_ranks}, but is {reshard}."
            )
        if reshard == 1:
            warnings.warn(
                "`reshard_after_forward=1` keeps whole parameters on each rank, as False does. Pass False, or a "
                "larger number.",
                stacklevel=3,
            )
        reshard = False if reshard == 1 else True if reshard == num_ranks else reshard
    hybrid = settings["sharding_strategy"] is not None
    if hybrid and reshard is False:
        settings["sharding_strategy"] = ShardingStrategy._HYBRID_SHARD_ZERO2
        reshard = True
    return resolve(
        reshard_after_forward=reshard,
        fp32_reduce_scatter=False,
        flatten_parameters=True,
        compute_dtype=None,
        move_grads_to_cpu=None,
        late=LateOptions(disable_reshard_on_root=keeps_root, keeps_across_passes=True),
        **settings,
    )


def _placing(placement: Placement | None, num_ranks: int) -> Callable[[ParamSlot], int]:
    """A function that returns the dimension along which a parameter is cut."""

    def dim_of(slot: ParamSlot) -> int:
        found: Any = None if placement is None else placement(slot.leaf)
        if found is None:
            return 0
        if not isinstance(found, Shard):
            raise TypeError(
                "`shard_placement_fn` must return a torch.distributed.tensor.Shard or None, but returned "
                f"{type(found).__name__} ({found!r}) for `{slot.fqn}`. All parameters of a unit are on its `mesh`."
            )
        shape = tuple(slot.shape)
        if not -len(shape) <= found.dim < len(shape):
            raise ValueError(
                f"`shard_placement_fn` must name a dimension of the parameter, but returned {found!r} for "
                f"`{slot.fqn}`, which has shape {shape}."
            )
        dim = found.dim % len(shape)
        if dim and shape[dim] % num_ranks:
            raise ValueError(
                f"A dimension other than the first must be cut evenly, but {num_ranks} ranks do not divide dimension "
                f"{dim} of `{slot.fqn}`, which has shape {shape}. Return None from `shard_placement_fn` for it."
            )
        return dim

    return dim_of
