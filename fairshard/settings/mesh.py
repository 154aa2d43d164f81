"""Meshes of `fully_shard`: the data-parallel ranks of a unit, and DTensors that are placed on them as well."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import compress
from math import prod
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from fairshard.settings.check import require
from fairshard.settings.placements import Owned, RowBlocks
from fairshard.utils.device import default_device_type
from fairshard.utils.groups import default_group

Names = str | tuple[str, ...] | None


@dataclass(frozen=True)
class DataParallelMeshDims:
    """The dimensions of a mesh, by name, that are data-parallel; several names are flattened into one dimension.

    Attributes:
        shard: parameters are sharded over these.
        replicate: parameters are replicated over these, and gradients summed.

    Raises:
        ValueError: both are None.

    Source: PyTorch's class of the same name.
    """

    shard: Names = None
    replicate: Names = None

    def __post_init__(self) -> None:
        require(
            self.shard is not None or self.replicate is not None,
            "`shard` or `replicate` must name dimensions of the mesh, but both are None.",
        )

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The names of ``shard``."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The names of ``replicate``."""
        return _names(self.replicate)


@dataclass(frozen=True)
class ShardPlacementResult:
    """Returned by ``shard_placement_fn``: the dimension to shard, and the ranks to shard over.

    Attributes:
        placement: a ``Shard``, a `RowBlocks` or an `Owned`; None is the first dimension.
        mesh_info: an object with an attribute ``mesh``, such as PyTorch's ``FSDPMeshInfo``; or a mesh.

    Source: PyTorch's class of the same name.
    """

    placement: Shard | RowBlocks | Owned | None
    mesh_info: Any


@dataclass(frozen=True)
class Placed:
    """The ``mesh`` and the ``placements`` of a DTensor."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> Placed:
        return self


@dataclass(frozen=True)
class DataMesh:
    """The ranks of a unit: ``mesh`` shards over its last dimension and, if it has two, replicates over its first.

    Attributes:
        whole: the mesh on which all parameters are DTensors already, and which ``mesh`` is a part of; otherwise None.
        shard, replicate: the dimensions of ``whole`` that ``mesh`` consists of. Without ``shard``, ``mesh`` has one
            dimension, which replicates.
    """

    mesh: DeviceMesh
    whole: DeviceMesh | None = None
    shard: tuple[str, ...] = ()
    replicate: tuple[str, ...] = ()

    @staticmethod
    def of(mesh: Any, dims: Any) -> DataMesh:
        """The ranks that the arguments ``mesh`` and ``dp_mesh_dims`` of `fully_shard` describe.

        **Collective** on the first use of several names for one dimension.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: the mesh has a wrong number of dimensions, lacks a name, or does not contain this rank.
        """
        if dims is None:
            check_mesh(mesh)
            return DataMesh(mesh)
        require(
            hasattr(dims, "shard") and hasattr(dims, "replicate"),
            f"`dp_mesh_dims` must be a DataParallelMeshDims or None, but is {dims!r}.",
            TypeError,
        )
        check_mesh(mesh, any_ndim=True)
        shard, replicate = _names(dims.shard), _names(dims.replicate)
        known = mesh.mesh_dim_names or ()
        unknown = next((name for name in (*shard, *replicate) if name not in known), None)
        require(
            unknown is None,
            f"`dp_mesh_dims` must name dimensions of `mesh`, but `{unknown}` is not one of {known}. Pass the mesh that "
            "the parameters are distributed on, with `mesh_dim_names`.",
        )
        require(
            not set(shard) & set(replicate) and (shard or replicate),
            f"`dp_mesh_dims` must name each dimension once, and at least one, but is {shard} to shard over and "
            f"{replicate} to replicate over.",
        )
        parts = [_flattened(mesh, names) for names in (replicate, shard) if names]
        own = parts[0] if len(parts) == 1 else joined_mesh(*parts)
        return DataMesh(own, mesh, shard, replicate)

    @property
    def shards(self) -> bool:
        """Whether parameters are sharded at all."""
        return self.whole is None or bool(self.shard)

    @property
    def num_shards(self) -> int:
        """The number of ranks that a parameter is cut among."""
        return self.mesh.size(self.mesh.ndim - 1) if self.shards else 1

    @property
    def replicates(self) -> bool:
        """Whether shards have replicas."""
        return self.mesh.ndim == 2

    def dp_dims_of(self, spec: DTensorSpec) -> frozenset[int]:
        """The dimensions of the mesh of ``spec`` that belong to this unit."""
        known = spec.mesh.mesh_dim_names or ()
        return frozenset(known.index(name) for name in self.shard + self.replicate)

    def check(self, spec: DTensorSpec, fqn: str) -> None:
        """Raise if parameter ``fqn``, a DTensor of ``spec``, cannot be sharded over these ranks.

        Raises:
            ValueError: it holds partial sums, is on another mesh, or is already cut over these ranks.
        """
        require(
            not any(placement.is_partial() for placement in spec.placements),
            f"A parameter must have values on each rank to be sharded, but `{fqn}` holds partial sums, "
            f"{spec.placements} on {spec.mesh}. Redistribute it first.",
        )
        if self.whole is None:
            common = set(self.mesh.mesh.flatten().tolist()) & set(spec.mesh.mesh.flatten().tolist())
            require(
                len(common) <= 1,
                f"A parameter that is a DTensor must not be on the ranks that it will be sharded over, but `{fqn}` is "
                f"on {spec.mesh} and `mesh` is {self.mesh}. Pass the data-parallel part as `mesh`; or, if the "
                "parameters are DTensors on the whole mesh, pass that and `dp_mesh_dims`.",
            )
            joined_mesh(self.mesh, spec.mesh)  # raises if they are not parts of one mesh
            return
        require(
            spec.mesh == self.whole,
            f"With `dp_mesh_dims` parameters must be DTensors on `mesh`, {self.whole}, but `{fqn}` is on {spec.mesh}. "
            "Distribute the module on that mesh.",
        )
        for dim in self.dp_dims_of(spec):
            require(
                spec.placements[dim].is_replicate(),
                f"With `dp_mesh_dims` parameters must be replicated over data-parallel dimensions, but `{fqn}` is "
                f"{spec.placements[dim]} on `{(self.whole.mesh_dim_names or ())[dim]}`. Distribute it as Replicate() "
                "there.",
            )

    def placed(self, spec: DTensorSpec, dim: int | None) -> Placed:
        """How a DTensor of ``spec`` is placed when it is also cut along ``dim``; None: not cut."""
        if self.whole is not None:
            return self._placed_on_whole(spec, dim)
        own: list[Placement] = [Replicate()] * self.mesh.ndim
        own[-1] = _cut_around(dim, spec.placements, [spec.mesh.size(i) for i in range(spec.mesh.ndim)])
        return Placed(joined_mesh(self.mesh, spec.mesh), (*own, *spec.placements))

    def _placed_on_whole(self, spec: DTensorSpec, dim: int | None) -> Placed:
        assert self.whole is not None
        names, mesh = self.whole.mesh_dim_names or (), self.whole
        placements = list(spec.placements)
        if not self.shard:
            return Placed(mesh, tuple(placements))
        if len(self.shard) == 1:
            place = names.index(self.shard[0])
            inner = placements[place + 1 :]
            placements[place] = _cut_around(dim, inner, [mesh.size(i) for i in range(place + 1, mesh.ndim)])
            return Placed(mesh, tuple(placements))
        # Several dimensions are one in the mesh of the sharded parameter.
        meshes, shown = [], list[Placement]()
        for place, name in enumerate(names):
            if name == self.shard[0]:
                inner = placements[place + 1 :]
                sizes = [mesh.size(i) for i in range(place + 1, mesh.ndim)]
                meshes.append(self.mesh)
                shown += [Replicate()] * (self.mesh.ndim - 1) + [_cut_around(dim, inner, sizes)]
            elif name not in self.shard + self.replicate:
                meshes.append(mesh[name])
                shown.append(placements[place])
        return Placed(reduce(joined_mesh, meshes), tuple(shown))


def _cut_around(dim: int | None, inner: Sequence[Placement], sizes: Sequence[int]) -> Placement:
    """The placement of a cut along ``dim`` of what ``inner``, placements on dimensions of ``sizes``, have cut before.

    Torch applies placements from left to right, so a cut to the left of another one of the same ``dim``, made after
    it, is a `_StridedShard`.
    """
    if dim is None:
        return Replicate()
    cuts = [isinstance(each, (Shard, _StridedShard)) and each.dim == dim for each in inner]
    factor = prod(compress(sizes, cuts))
    return _StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim)


def _names(given: Any) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)


def _flattened(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


# ---- meshes

# Weak keys and values: a mesh holds its group, which would otherwise live forever with its threads.
_meshes: weakref.WeakKeyDictionary[ProcessGroup, weakref.ref[DeviceMesh]] = weakref.WeakKeyDictionary()


def default_mesh() -> DeviceMesh:
    """The 1-D mesh of all ranks; always the same object while anything uses it."""
    group = default_group()
    mesh = _known_mesh(group)
    if mesh is None:
        mesh = init_device_mesh(default_device_type(), (group.size(),))
        _meshes[group] = weakref.ref(mesh)
    return mesh


def _known_mesh(group: ProcessGroup) -> DeviceMesh | None:
    known = _meshes.get(group)
    return None if known is None else known()


def joined_mesh(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """The mesh of the dimensions of ``outer``, then those of ``inner``; both must be parts of one mesh.

    Raises:
        ValueError: they are not.
    """
    try:
        if hasattr(DeviceMesh, "_concatenate"):
            return DeviceMesh._concatenate([outer, inner])
        from torch.distributed.device_mesh import _mesh_resources  # torch < 2.10

        root = _mesh_resources.get_root_mesh(outer)
        if root != _mesh_resources.get_root_mesh(inner):
            raise ValueError("they have no common mesh")
        names = (outer.mesh_dim_names or ()) + (inner.mesh_dim_names or ())
        return root[names]
    except (ValueError, RuntimeError, KeyError, TypeError, AssertionError) as error:
        raise ValueError(
            f"The data-parallel mesh and the mesh of a parameter that is a DTensor must be parts of one mesh, but are "
            f"{outer} and {inner} ({error}). Take both from one `init_device_mesh(..., mesh_dim_names=...)`."
        ) from error


def check_mesh(mesh: Any, any_ndim: bool = False) -> None:
    """Check that ``mesh`` is 1-D (shards) or 2-D (replicas, shards), or has ``any_ndim``, and contains this rank.

    Raises:
        TypeError: it is not a mesh.
        ValueError: it has more dimensions, or does not contain this rank.
    """
    require(
        isinstance(mesh, DeviceMesh),
        f"`mesh` must be a DeviceMesh, but is {type(mesh).__name__}. Make one with init_device_mesh.",
        TypeError,
    )
    require(
        any_ndim or mesh.ndim in (1, 2),
        f"`mesh` must have one dimension, or two for hybrid sharding (replicas, shards), but has {mesh.ndim}. Pass its "
        "data-parallel part.",
    )
    require(
        mesh.get_coordinate() is not None,
        f"`mesh` must have this rank in it, but holds {mesh.mesh.tolist()} and not rank {dist.get_rank()}. Call "
        "fully_shard on the ranks of the mesh only.",
    )


class SavedMesh:
    """A ``mesh``; after unpickling, a mesh of the same ranks without groups until `connect`."""

    def __init__(self, mesh: DeviceMesh, is_connected: bool = True) -> None:
        self.mesh = mesh
        self.is_connected = is_connected

    def connect(self, groups: tuple[ProcessGroup, ...]) -> None:
        """Use ``groups``, one per dimension. No communication."""
        old = self.mesh
        names = old.mesh_dim_names or tuple(f"dim_{index}" for index in range(old.ndim))
        if old.ndim == 1:
            self.mesh = DeviceMesh.from_group(groups[0], old.device_type, mesh_dim_names=old.mesh_dim_names)
        else:
            self.mesh = DeviceMesh.from_group(list(groups), old.device_type, mesh=old.mesh, mesh_dim_names=names)
        self.is_connected = True

    def __deepcopy__(self, memo: dict[int, Any]) -> SavedMesh:
        return SavedMesh(self.mesh, self.is_connected)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.mesh,)


def _restored(mesh: DeviceMesh) -> SavedMesh:
    """Unpickle ``mesh``: on the default group if it spans all ranks, otherwise without groups."""
    if not dist.is_initialized() or mesh.mesh.tolist() != list(range(dist.get_world_size())):
        return SavedMesh(mesh, is_connected=False)
    group = default_group()
    known = _known_mesh(group)
    if known is None or (known.device_type, known.mesh_dim_names) != (mesh.device_type, mesh.mesh_dim_names):
        known = DeviceMesh.from_group(group, mesh.device_type, mesh_dim_names=mesh.mesh_dim_names)
    return SavedMesh(known)
