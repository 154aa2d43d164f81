"""Whole values of PyTorch's ``ShardedTensor``, in which FSDP1 returns sharded state."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from fairshard.utils.groups import communicator, default_group, on_host


def gathered(value: Any) -> Any:
    """``value``, or if it is a ``ShardedTensor`` the whole tensor in host memory. **Collective** over its group then.

    Raises:
        ValueError: on all ranks, if the ranks together do not have every element once.
    """
    return _gathered(value) if isinstance(value, ShardedTensor) else value


def _gathered(value: ShardedTensor) -> Tensor:
    comm = on_host(communicator(value._process_group or default_group()))
    shards = [(shard.metadata, shard.tensor.detach().reshape(-1).cpu()) for shard in value.local_shards()]
    own = [(tuple(place.shard_offsets), tuple(place.shard_sizes)) for place, _ in shards]
    boxes: list[list[tuple[tuple[int, ...], tuple[int, ...]]]] = comm.gather_objects(own)
    numels = [sum(prod(sizes) for _, sizes in each) for each in boxes]
    shape = torch.Size(value.size())
    if sum(numels) != shape.numel():
        raise ValueError(
            f"A ShardedTensor must have all its elements on the ranks of its group, but of {shape.numel()} elements "
            f"of shape {tuple(shape)} these ranks have {sum(numels)}. Load it on the ranks that saved it."
        )
    rows = torch.zeros(comm.world_size, max(numels), dtype=value.dtype, device="cpu")
    if shards:
        rows[comm.rank, : numels[comm.rank]] = torch.cat([values for _, values in shards])
    if comm.world_size > 1 and shape.numel():
        on_host(comm).gather_messages(rows).wait()
    whole = torch.empty(shape, dtype=value.dtype, device="cpu")
    for row, each in zip(rows, boxes, strict=True):
        start = 0
        for offsets, sizes in each:
            place = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
            whole[place] = row[start : start + prod(sizes)].view(sizes)
            start += prod(sizes)
    return whole
