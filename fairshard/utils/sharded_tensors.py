"""Whole values of PyTorch's ``ShardedTensor``, in which FSDP1 returns sharded state."""

from __future__ import annotations

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
    # Clones, because the pickle of a view has all memory that it is a view of.
    own = [(shard.metadata.shard_offsets, shard.tensor.detach().cpu().clone()) for shard in value.local_shards()]
    parts: list[tuple[list[int], Tensor]] = [each for rank in comm.gather_objects(own) for each in rank]
    shape, numel = torch.Size(value.size()), sum(part.numel() for _, part in parts)
    if numel != shape.numel():
        raise ValueError(
            f"A ShardedTensor must have all its elements on the ranks of its group, but of {shape.numel()} elements "
            f"of shape {tuple(shape)} these ranks have {numel}. Load it on the ranks that saved it."
        )
    whole = torch.empty(shape, dtype=value.dtype, device="cpu")
    for offsets, part in parts:
        places = zip(offsets, part.shape, strict=True)
        whole[tuple(slice(offset, offset + size) for offset, size in places)] = part
    return whole
