"""Snapshot of the values to save, taken at one moment while training continues.

Tensors on a GPU, or in memory that the next step overwrites, are copied to host memory, into buffers that the next
save reuses. Masters in host memory (``cpu_offload``, ``move_grads_to_cpu``) are not copied: the writer reads them in
place, and the next step of any optimizer first copies those that the writer has not read yet.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fairshard.errors import CheckpointError
from fairshard.utils.before_step import add_before_step, remove_before_step
from fairshard.utils.dtensors import memory_of
from fairshard.utils.pinned import host_empty_like
from fairshard.utils.span_tensor import SpanTensor
from fairshard.utils.streams import now

Buffers = dict[tuple[int, int, torch.dtype], Tensor]


@dataclass(eq=False)
class _Memory:
    """Memory ``[n]`` to save, whose writes the version of ``written`` counts.

    It is read in place, as long as bytes are ``unread`` that no step changes, or from its ``copy``.
    """

    whole: Tensor
    written: Tensor
    version: int
    place: int
    unread: int = 0
    copy: Tensor | None = None

    def check(self) -> None:
        """Check that nothing has written to it since the snapshot.

        Raises:
            CheckpointError: something has.
        """
        if self.written._version != self.version:
            raise CheckpointError(
                "During a background save only optimizers may change parameters and optimizer state, but something "
                "else did. Call Checkpointer.wait() before such a change."
            )


class Snapshot:
    """Values at one moment; ``entries`` holds them as nested dicts of tensors, span tensors and objects.

    ``buffers`` keeps host memory from save to save; None copies nothing, and the caller must not change the values.
    ``live`` holds the storages (by `data_ptr`) that may be read in place; all others are copied now.
    """

    def __init__(self, entries: Mapping[str, Any], buffers: Buffers | None, live: set[int]) -> None:
        self._buffers: Buffers = {} if buffers is None else buffers
        self._lock = threading.Lock()
        self._memory: dict[int, _Memory] = {}  # by address, in the same order in every save of a model
        self._live = live
        self.nbytes_copied = 0
        self.entries = entries if buffers is None else self._map(entries)
        for device in {memory.whole.device for memory in self._memory.values()} - {torch.device("cpu")}:
            now(device).synchronize()
        if live:
            add_before_step(id(self), weakref.WeakMethod(self.copy_rest))

    def read(self, part: Tensor) -> Tensor:
        """Value of ``part``, a view into `entries`, at the snapshot. Call once per part, on the writer's thread."""
        address = part.data_ptr()
        key = address if address in self._memory else part.untyped_storage().data_ptr()
        memory = self._memory.get(key) if part.numel() else None
        if memory is None:
            return part
        with self._lock:
            if memory.copy is not None:
                start = memory.copy.storage_offset() + (address - key) // part.element_size()
                return memory.copy.as_strided(part.shape, part.stride(), start)
            memory.check()
            memory.unread -= part.nbytes
            return part.clone()

    def copy_rest(self) -> None:
        """Copy the values not read yet, because they are about to change."""
        with self._lock:
            for memory in self._memory.values():
                if memory.copy is None and memory.unread > 0:
                    memory.check()
                    self._copy(memory)

    def close(self) -> None:
        """Release all memory; `read` must not be called again."""
        remove_before_step(id(self))
        with self._lock:
            self._memory.clear()

    def _map(self, value: Any) -> Any:
        if isinstance(value, (SpanTensor, DTensor)):
            if memory_of(value).numel():
                self._take(value)
            return value
        if isinstance(value, Tensor):
            return value.detach().to("cpu", copy=True)
        if isinstance(value, Mapping):
            return {key: self._map(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [self._map(entry) for entry in value]
        return value

    def _take(self, value: SpanTensor | DTensor) -> None:
        """Copy the local memory of ``value`` once, or register it to be read in place.

        For a span tensor, this covers the whole shard that contains it; for a DTensor, only its own elements.
        """
        own = memory_of(value)
        whole = _all_of(own) if isinstance(value, SpanTensor) else _extent_of(own)
        # Writes through a DTensor change the version of the DTensor, not of its local memory.
        written = whole if isinstance(value, SpanTensor) else value
        is_live = own.untyped_storage().data_ptr() in self._live
        new = _Memory(whole, written, written._version if is_live else 0, len(self._memory))
        memory = self._memory.setdefault(whole.data_ptr(), new)
        if is_live:
            memory.unread += own.nbytes
        elif memory.copy is None:
            self._copy(memory)

    def _copy(self, memory: _Memory) -> None:
        """Copy into the buffer kept from the last save."""
        whole, slot = memory.whole, (memory.place, memory.whole.numel(), memory.whole.dtype)
        if slot not in self._buffers:
            self._buffers[slot] = host_empty_like(whole, whole.device)
        memory.copy = self._buffers[slot].copy_(whole, non_blocking=True)
        self.nbytes_copied += whole.nbytes


def _extent_of(part: Tensor) -> Tensor:
    """The memory from the first to the last element of ``part``, 1-D, including gaps."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    return part.detach().as_strided((extent,), (1,))


def _all_of(part: Tensor) -> Tensor:
    """The whole storage that ``part`` is a view of, 1-D."""
    numel = part.untyped_storage().nbytes() // part.element_size()
    return part.detach().as_strided((numel,), (1,), 0)
