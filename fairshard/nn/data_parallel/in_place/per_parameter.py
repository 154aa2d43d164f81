"""The answers of ``shard_placement_fn``: how, and over which ranks, each parameter is sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fairshard.engine.tree import unit_of
from fairshard.params.slot import ParamSlot
from fairshard.settings.data_mesh import DataMesh, ShardPlacementResult
from fairshard.settings.placements import Owned, RowBlocks
from fairshard.setup.lines import check_owner
from fairshard.utils.subclasses import check_dtensor_subclasses

Placement = Callable[[nn.Parameter], Shard | RowBlocks | Owned | ShardPlacementResult | None]


def placing(placement: Placement | None, data: DataMesh) -> Callable[[ParamSlot], int | RowBlocks | Owned]:
    """A function that returns how parameters are cut over the ranks of ``data``, or a dimension."""
    num_ranks = data.num_shards

    def placement_of(slot: ParamSlot) -> int | RowBlocks | Owned:
        found: Any = None if placement is None else placement(slot.leaf)
        if found is not None and _elsewhere(found) is not None:
            if not _is_on(found, data):
                raise ValueError(
                    f"Parameters of one module must be sharded over the same ranks, but `shard_placement_fn` returned "
                    f"{_mesh_of(found)} for `{slot.fqn}`, whose module also has parameters on {data.mesh}. Put them "
                    "into a submodule with a forward of its own."
                )
            found = found.placement
        if found is None:
            return 0
        if isinstance(found, Owned):
            check_owner(found, slot.fqn, num_ranks)
        if isinstance(found, (RowBlocks, Owned)):
            check_dtensor_subclasses(slot.fqn)
            return found
        if not isinstance(found, Shard):
            raise TypeError(
                "`shard_placement_fn` must return a torch.distributed.tensor.Shard, a fairshard.nn.RowBlocks or "
                "Owned, a ShardPlacementResult or None, "
                f"but returned {type(found).__name__} ({found!r}) for `{slot.fqn}`."
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

    return placement_of


def modules_elsewhere(module: nn.Module, placement: Placement, data: DataMesh) -> dict[nn.Module, dict[str, Any]]:
    """The outermost modules in ``module`` whose parameters are all sharded over the same ranks, but not of ``data``.

    Returns ``mesh`` and ``dp_mesh_dims`` of each, as for `fully_shard`. Modules sharded already are left out.
    """
    found: dict[nn.Module, dict[str, Any]] = {}
    for child in module.children():
        if unit_of(child) is not None:
            continue
        params = list(child.parameters())
        answers = [placement(param) for param in params]
        first = answers[0] if answers else None
        if first is None or _elsewhere(first) is None or _is_on(first, data) or not _are_alike(answers):
            found.update(modules_elsewhere(child, placement, data))
            continue
        info: Any = _elsewhere(first)
        dims = getattr(info, "dp_mesh_dims", None)
        found[child] = {"mesh": _mesh_of(first) if dims is None else info.spmd_mesh, "dp_mesh_dims": dims}
    return found


def _elsewhere(found: Any) -> Any:
    """The mesh, or its description, that a parameter is sharded over; None: that of its unit."""
    return getattr(found, "mesh_info", None)


def _mesh_of(found: Any) -> DeviceMesh | None:
    info = _elsewhere(found)
    return getattr(info, "mesh", None) if not isinstance(info, DeviceMesh) else info


def _is_on(found: Any, data: DataMesh) -> bool:
    return _mesh_of(found) == data.mesh


def _are_alike(answers: list[Any]) -> bool:
    return all(_mesh_of(answer) == _mesh_of(answers[0]) for answer in answers)
