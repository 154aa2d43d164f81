"""The data-parallel ranks of `fully_shard`, and how parameters that are DTensors already are placed on them as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from fairshard.settings.mesh import check_mesh, joined_mesh
from fairshard.settings.placements import Owned, RowBlocks

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
        if self.shard is None and self.replicate is None:
            raise ValueError("`shard` or `replicate` must name dimensions of the mesh, but both are None.")

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
        if not hasattr(dims, "shard") or not hasattr(dims, "replicate"):
            raise TypeError(f"`dp_mesh_dims` must be a DataParallelMeshDims or None, but is {dims!r}.")
        check_mesh(mesh, any_ndim=True)
        shard, replicate = _names(dims.shard), _names(dims.replicate)
        known = mesh.mesh_dim_names or ()
        for name in (*shard, *replicate):
            if name not in known:
                raise ValueError(
                    f"`dp_mesh_dims` must name dimensions of `mesh`, but `{name}` is not one of {known}. Pass the mesh "
                    "that the parameters are distributed on, with `mesh_dim_names`."
                )
        if set(shard) & set(replicate) or not (shard or replicate):
            raise ValueError(
                f"`dp_mesh_dims` must name each dimension once, and at least one, but is {shard} to shard over and "
                f"{replicate} to replicate over."
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
        if any(placement.is_partial() for placement in spec.placements):
            raise ValueError(
                f"A parameter must have values on each rank to be sharded, but `{fqn}` holds partial sums, "
                f"{spec.placements} on {spec.mesh}. Redistribute it first."
            )
        if self.whole is None:
            ranks, theirs = set(self.mesh.mesh.flatten().tolist()), set(spec.mesh.mesh.flatten().tolist())
            if len(ranks & theirs) > 1:
                raise ValueError(
                    f"A parameter that is a DTensor must not be on the ranks that it will be sharded over, but `{fqn}` "
                    f"is on {spec.mesh} and `mesh` is {self.mesh}. Pass the data-parallel part as `mesh`; or, if the "
                    "parameters are DTensors on the whole mesh, pass that and `dp_mesh_dims`."
                )
            joined_mesh(self.mesh, spec.mesh)  # raises if they are not parts of one mesh
            return
        if spec.mesh != self.whole:
            raise ValueError(
                f"With `dp_mesh_dims` parameters must be DTensors on `mesh`, {self.whole}, but `{fqn}` is on "
                f"{spec.mesh}. Distribute the module on that mesh."
            )
        for dim in self.dp_dims_of(spec):
            if not spec.placements[dim].is_replicate():
                raise ValueError(
                    f"With `dp_mesh_dims` parameters must be replicated over data-parallel dimensions, but `{fqn}` is "
                    f"{spec.placements[dim]} on `{(self.whole.mesh_dim_names or ())[dim]}`. Distribute it as "
                    "Replicate() there."
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
        joined = meshes[0]
        for other in meshes[1:]:
            joined = joined_mesh(joined, other)
        return Placed(joined, tuple(shown))


def _cut_around(dim: int | None, inner: Sequence[Placement], sizes: Sequence[int]) -> Placement:
    """The placement of a cut along ``dim`` of what ``inner``, placements on dimensions of ``sizes``, have cut before.

    Torch applies placements from left to right, so a cut to the left of another one of the same ``dim``, made after
    it, is a `_StridedShard`.
    """
    if dim is None:
        return Replicate()
    factor = 1
    for placement, size in zip(inner, sizes, strict=True):
        if isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim:
            factor *= size
    return _StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim)


def _names(given: Any) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)


def _flattened(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))
