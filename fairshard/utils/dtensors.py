"""Conversions between DTensors and whole tensors: this rank's part of a whole tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _state_dict_utils
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fairshard.utils.ragged_tensor import RaggedShard, RaggedTensor, ragged_of, ragged_part_of
from fairshard.utils.span import cut
from fairshard.utils.span_tensor import SpanTensor

# What torch.utils.dlpack.from_dlpack does after checks for other libraries' tensors, which take longer.
_to_dlpack: Callable[[Tensor], Any] = torch._C._to_dlpack
_from_dlpack: Callable[[Any], Tensor] = torch._C._from_dlpack


def part_of(whole: Tensor, like: DTensor) -> DTensor:
    """This rank's part of ``whole`` as a DTensor placed like ``like``, of the same shape; a view, no communication.

    Raises:
        ValueError: ``like`` has a placement other than Shard, _StridedShard, RaggedShard and Replicate.
    """
    if isinstance(like, RaggedTensor):
        return ragged_part_of(whole, like._spec)
    local, mesh = whole.detach(), like.device_mesh
    for mesh_dim in _order_of_cuts(like.placements):
        placement: Any = like.placements[mesh_dim]
        numel = local.shape[placement.dim]
        chunk = cut(numel, mesh.size(mesh_dim))
        start = min(mesh.get_local_rank(mesh_dim) * chunk, numel)
        local = local.narrow(placement.dim, start, min(chunk, numel - start))
    return DTensor.from_local(local, mesh, like.placements, run_check=False, shape=whole.shape, stride=whole.stride())


def _order_of_cuts(placements: Sequence[Placement]) -> list[int]:
    """The dimensions of a mesh that cut a tensor, in the order of the cuts.

    Plain cuts are made from left to right. A strided one was made after the plain ones to its right.
    """
    plain, strided = [], []
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):  # first: before torch 2.10 it is also a Shard
            strided.append(mesh_dim)
        elif isinstance(placement, Shard):
            plain.append(mesh_dim)
        elif not isinstance(placement, Replicate):
            raise ValueError(f"A whole tensor can be cut for Shard and Replicate, but not for {placement}.")
    return plain + strided[::-1]


def placed_as(source: Tensor, like: DTensor) -> DTensor:
    """``source`` as a DTensor placed like ``like``. **Collective** if it is a DTensor with another placement.

    Raises:
        ValueError: the shapes differ, or ``source`` is a span tensor: elements that this rank needs may be missing.
    """
    if source.shape != like.shape:
        raise ValueError(f"Shapes must be equal, but {tuple(source.shape)} would go into {tuple(like.shape)}.")
    if isinstance(source, SpanTensor):
        raise ValueError(
            "A value loaded into a DTensor must be whole or a DTensor, but is a run of elements from "
            "FullyShardedDataParallel's sharded state. Load it through torch.distributed.checkpoint or "
            "fairshard.checkpoint, which read the elements needed."
        )
    if isinstance(source, DTensor):
        if isinstance(source.placements[-1], RaggedShard) and not isinstance(source, RaggedTensor):
            raise ValueError(
                f"A DTensor placed by {source.placements[-1]} must come from a sharded model, because torch does not "
                "know how many rows each rank has. Load a whole value, or through torch.distributed.checkpoint."
            )
        if are_placed_alike(source, like):
            return source
        source = source.full_tensor()
    return part_of(source, like)


def are_placed_alike(a: DTensor, b: DTensor) -> bool:
    """Whether each rank has the same part of both."""
    return a.device_mesh == b.device_mesh and a.placements == b.placements


def memory_of(tensor: Tensor) -> Tensor:
    """This rank's memory of ``tensor``: its part of a DTensor or span tensor, otherwise the tensor itself."""
    if isinstance(tensor, DTensor):
        local: Tensor = tensor._local_tensor
        return local.detach()
    return tensor.run if isinstance(tensor, SpanTensor) else tensor


def own_storage(view: Tensor) -> Tensor:
    """The elements of ``view``, in the same memory, as a tensor whose storage begins with them.

    For local tensors of DTensors: torch (to 2.13) pickles and copies only DTensors whose local tensor begins its
    storage. Writes to it do not count as writes to ``view``.
    """
    if not view.storage_offset():
        return view
    if view.is_meta or not view.numel():
        return torch.empty_like(view)
    return _from_dlpack(_to_dlpack(view))


_DISTRIBUTE = "distribute_tensor"  # a whole value that every rank has
_AFTER_BROADCAST = "_distribute_tensors"  # values that rank 0 has sent, each with the DTensor that it goes into


@functools.cache
def cut_whole_values() -> None:
    """From now on, make torch's functions for full state dicts cut whole values where cuts of blocks are.

    ``torch.distributed.checkpoint.state_dict`` loads state with ``full_state_dict=True`` through two functions of a
    private module (to torch 2.13). Both know even chunks only: without this, one raises, and the other, which ranks
    enter while rank 0 broadcasts, raises on some ranks and leaves the others waiting.
    """
    for name, extended in ((_DISTRIBUTE, _also_by_blocks), (_AFTER_BROADCAST, _blocks_first)):
        original = getattr(_state_dict_utils, name, None)
        if original is not None:
            setattr(_state_dict_utils, name, extended(original))


def _also_by_blocks(distribute: Callable[..., DTensor]) -> Callable[..., DTensor]:
    @functools.wraps(distribute)
    def call(tensor: Tensor, device_mesh: Any = None, placements: Any = None, **kwargs: Any) -> DTensor:
        last: Placement | None = placements[-1] if placements else None
        if isinstance(last, RaggedShard) and not isinstance(tensor, DTensor):
            return ragged_of(tensor, device_mesh, placements)
        return distribute(tensor, device_mesh, placements, **kwargs)

    return call


def _blocks_first(distribute: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(distribute)
    def call(local_state: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any) -> None:
        for key in keys:
            found = local_state.get(key)
            if isinstance(found, tuple) and isinstance(found[0], RaggedTensor):
                like, whole = found
                part = ragged_part_of(whole, like._spec)
                local_state[key] = part.clone() if like.is_meta else like.copy_(part)
        distribute(local_state, keys, *args, **kwargs)  # skips those

    return call
