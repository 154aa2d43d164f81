"""User-defined gathers and reductions in place of those of ``collectives.py``.

Inputs and outputs are in memory from ``allocate``. The engine copies into and out of it, so ``allocate`` may return the
same memory every time.

Source: the interfaces are those of PyTorch's FSDP2; its own subclasses are also accepted.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fairshard.utils.collectives import GATHER, SCATTER, Communicator, RowGather
from fairshard.utils.groups import backend_name
from fairshard.utils.streams import now
from fairshard.utils.transfers import Transfer


class Comm(ABC):
    """Allocator of memory for communication; base of `AllGather` and `ReduceScatter`."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A contiguous tensor of ``size`` with any contents; called on the stream that uses it."""


class AllGather(Comm):
    """All-gather for `FSDPModule.set_custom_all_gather`."""

    @abstractmethod
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False) -> Any:
        """Fill ``output_tensor`` ``[world_size * S]`` with ``input_tensor`` ``[S]`` of each rank, in rank order.

        ``input_tensor`` is this rank's part of ``output_tensor``, from `allocate`. Always called with ``async_op``
        False; a result other than None is waited for. **Collective.**
        """


class ReduceScatter(Comm):
    """Reduce-scatter for `FSDPModule.set_custom_reduce_scatter`."""

    @abstractmethod
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Fill ``output_tensor`` ``[S]`` with this rank's part of ``input_tensor`` ``[world_size * S]``, reduced.

        Both are from `allocate`. ``op`` is always ``ReduceOp.SUM`` and ``async_op`` False; a result other than None is
        waited for. **Collective.**
        """


class CustomGather(RowGather):
    """``rows``, gathered through an `AllGather`."""

    __slots__ = ("_custom",)

    def __init__(self, rows: RowGather, custom: AllGather) -> None:
        super().__init__(rows.comm, rows.buffer)
        self._custom = custom

    def start(self, tag: int) -> Transfer:
        """Gather, in program order."""
        comm, buffer = self.comm, self.buffer
        if comm.world_size == 1:
            return super().start(tag)
        comm.count("all_gather", buffer.nbytes - buffer.nbytes // comm.world_size)
        output = _allocated(self._custom, buffer.numel(), buffer)
        own = output.view_as(buffer)[comm.rank]
        own.copy_(buffer[comm.rank])
        _wait(self._custom(output_tensor=output, input_tensor=own, group=comm.group, async_op=False))
        buffer.copy_(output.view_as(buffer))
        return Transfer((now(buffer.device),), buffer)


class CustomReduce(Communicator):
    """``comm`` with a `ReduceScatter` in place of its own."""

    def __init__(self, comm: Communicator, custom: ReduceScatter) -> None:
        super().__init__(comm.group, comm.backend)
        self.counts = comm.counts
        self._custom = custom

    def reduce_scatter(self, bucket: Tensor, tag: int) -> Transfer:
        """See `Communicator.reduce_scatter`. Runs in program order; fp16 is sent divided by a power of 2."""
        self.count("reduce_scatter", bucket.nbytes - bucket.nbytes // self.world_size)
        if self.world_size == 1:
            return Transfer(result=bucket[0])
        power = self.divide_fp16(bucket)
        given, reduced = (_allocated(self._custom, numel, bucket) for numel in (bucket.numel(), bucket.size(1)))
        given.copy_(bucket.view(-1))
        done = self._custom(
            output_tensor=reduced, input_tensor=given, group=self.group, op=dist.ReduceOp.SUM, async_op=False
        )
        _wait(done)
        wide = reduced.to(torch.promote_types(reduced.dtype, torch.float32), copy=True)
        return Transfer(result=wide.mul_(power) if power > 1 else wide)


class _OfGroup(Comm):
    """Memory from the allocator of the backend of ``group``."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory that the backend uses directly, without copies."""
        return _of_backend(self._group, size, dtype, device)


class GroupAllGather(_OfGroup, AllGather):
    """The group's all-gather, in memory from its backend's allocator."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False) -> Any:
        """Gather with the group's own method."""
        return getattr(group, GATHER)(output_tensor, input_tensor)


class GroupReduceScatter(_OfGroup, ReduceScatter):
    """The group's reduce-scatter, in memory from its backend's allocator."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Sum with the group's own method."""
        return getattr(group, SCATTER)(output_tensor, input_tensor)


def check_allocates(group: ProcessGroup, device: torch.device) -> None:
    """Check that the backend of ``group`` can allocate memory on ``device``.

    Raises:
        ValueError: it cannot.
    """
    name = backend_name(group, device)
    allocates = False
    if name not in ("fake", "threaded"):
        supports = getattr(group._get_backend(device), "supports_tensor_alloc", None)
        allocates = supports is not None and supports(device)
    if not allocates:
        raise ValueError(
            f"The backend must be able to allocate memory for communication, but {name} has no allocator on "
            f"{device.type} here. Do not call set_allocate_memory_from_process_group_for_comm, or use NCCL on GPUs "
            "that support multicast (NVSwitch)."
        )


def _of_backend(group: ProcessGroup, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    made: Tensor = group._get_backend(device).allocate_tensor(math.prod(size), dtype=dtype, device=device)
    return made.view(*size)


def _allocated(custom: Comm, numel: int, like: Tensor) -> Tensor:
    made = custom.allocate((numel,), dtype=like.dtype, device=like.device)
    is_fit = isinstance(made, Tensor) and made.numel() == numel and made.dtype == like.dtype
    if not is_fit or made.device != like.device or not made.is_contiguous():
        shown = f"{tuple(made.shape)} {made.dtype} on {made.device}" if isinstance(made, Tensor) else repr(made)
        raise ValueError(
            f"`allocate` of {type(custom).__name__} must return a contiguous tensor of {numel} elements, {like.dtype} "
            f"on {like.device}, but returned {shown}."
        )
    return made.view(-1)


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()
