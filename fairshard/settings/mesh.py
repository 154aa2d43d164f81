"""The mesh of a unit's DTensors: shared by deepcopy, pickled without its groups."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fairshard.utils.device import default_device_type
from fairshard.utils.groups import default_group

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
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"`mesh` must be a DeviceMesh, but is {type(mesh).__name__}. Make one with init_device_mesh.")
    if mesh.ndim not in (1, 2) and not any_ndim:
        raise ValueError(
            f"`mesh` must have one dimension, or two for hybrid sharding (replicas, shards), but has {mesh.ndim}. Pass "
            "its data-parallel part."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"`mesh` must have this rank in it, but holds {mesh.mesh.tolist()} and not rank {dist.get_rank()}. Call "
            "fully_shard on the ranks of the mesh only."
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
