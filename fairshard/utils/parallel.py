"""Checks of process groups, and cutting a tensor like ``torch.chunk``."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from fairshard.utils.groups import backend_name

__all__ = ["chunk_and_pad", "validate_process_group"]


def chunk_and_pad(tensor: Tensor, num_chunks: int) -> list[Tensor]:
    """Cut ``tensor``, flattened, into ``num_chunks`` pieces of equal size, the last ones padded with zeros.

    Full pieces are views of ``tensor``; only those that need padding are new memory.
    """
    flat = tensor.reshape(-1)
    width = -(-flat.numel() // num_chunks)
    chunks = []
    for index in range(num_chunks):
        chunk = flat[index * width : (index + 1) * width]
        chunks.append(chunk if chunk.numel() == width else F.pad(chunk, [0, width - chunk.numel()]))
    return chunks


def validate_process_group(device: torch.device, process_group: ProcessGroup) -> None:
    """Check that ``process_group`` can transfer tensors of ``device``; no communication.

    Raises:
        TypeError: ``process_group`` is not a process group of this rank.
        ValueError: its backend cannot handle ``device``.
    """
    check_is_group(process_group)
    name = backend_name(process_group, device)
    if name is None or (device.type != "cpu" and name == "mpi"):
        raise ValueError(
            f"`process_group` must have a backend for {device.type} tensors, but none is set up for it. "
            'Pass a group made with backend="gloo" (CPU) or the backend of the accelerator, such as "nccl".'
        )


def check_is_group(process_group: Any, name: str = "process_group") -> None:
    """Check that ``process_group``, the argument ``name``, is a process group of this rank.

    Raises:
        TypeError: it is no group.
        ValueError: this rank is not in it.
    """
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"`{name}` must hold this rank, but rank {dist.get_rank()} is not in it. Shard on the ranks of the group "
            "only, or make groups that hold every rank, and pass each rank its own."
        )
    if not isinstance(process_group, ProcessGroup):
        raise TypeError(
            f"`{name}` must be a torch.distributed.ProcessGroup that this rank belongs to, but is "
            f"{process_group!r}. Create it with torch.distributed.new_group() on all ranks."
        )
