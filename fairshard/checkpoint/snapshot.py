"""Snapshot of the values to save, taken at one moment while training continues.

Tensors on a GPU, or in memory that the next step overwrites, are copied to host memory, into buffers that the next
save reuses. Masters in host memory (``cpu_offload``, ``move_grads_to_cpu``) are not copied: the writer reads them in
place, and the next step of any optimizer first copies those that the writer has not read yet.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
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


class Snapshot:
    """Values at one moment; ``entries`` holds them as nested dicts of tensors, span tensors and objects.

    ``buffers`` keeps host memory from save to save; None copies nothing, and the caller must not change the values.
    ``live`` holds the storages (by `data_ptr`) that may be read in place; all others are copied now.
    """

    def __init__(self, entries: Mapping[str, Any], buffers: Buffers | None, live: set[int]) -> None:
        self._buffers: Buffers = {} if buffers is None else buffers
        self._lock = threading.Lock()
        self._live: dict[int, tuple[Tensor, Tensor, int]] = {}  # tensor to read, tensor that counts writes, its version
        self._copies: dict[int, Tensor] = {}
        self._places: dict[int, int] = {}  # index of each storage, the same in every save of a model
        self._unread: dict[int, int] = {}  # bytes left to read, of storages read in place
        self._may_be_live = live
        self.nbytes_copied = 0
        self._device: torch.device | None = None
        self.entries = entries if buffers is None else self._map(entries)
        if self._device is not None:
            now(self._device).synchronize()
        if self._live:
            add_before_step(self._key, weakref.WeakMethod(self.copy_rest))

    @property
    def _key(self) -> int:
        return id(self)

    def read(self, part: Tensor) -> Tensor:
        """Value of ``part``, a view into `entries`, at the snapshot. Call once per part, on the writer's thread."""
        if not part.numel():
            return part
        key = part.data_ptr()
        if key not in self._places:
            key = part.untyped_storage().data_ptr()
        with self._lock:
            copy = self._copies.get(key)
            if copy is not None:
                start = (part.data_ptr() - key) // part.element_size()
                return copy.as_strided(part.shape, part.stride(), copy.storage_offset() + start)
            if key not in self._unread:
                return part
            self._unread[key] -= part.nbytes
            self._check(key)
            if self._unread[key] <= 0:
                self._live.pop(key, None)
            return part.clone()

    def copy_rest(self) -> None:
        """Copy the values not read yet, because they are about to change."""
        with self._lock:
            for key in list(self._live):
                self._check(key)
                self._copy(key, self._live.pop(key)[0])

    def _check(self, key: int) -> None:
        _, written, version = self._live[key]
        if written._version != version:
            raise CheckpointError(
                "During a background save only optimizers may change parameters and optimizer state, but something "
                "else did. Call Checkpointer.wait() before such a change."
            )

    def close(self) -> None:
        """Release all memory; `read` must not be called again."""
        remove_before_step(self._key)
        with self._lock:
            self._live.clear()
            self._copies.clear()
            self._unread.clear()

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
        memory = memory_of(value)
        whole = _all_of(memory) if isinstance(value, SpanTensor) else _extent_of(memory)
        # Writes through a DTensor change the version of the DTensor, not of its local memory.
        written = whole if isinstance(value, SpanTensor) else value
        key = whole.data_ptr()
        self._places.setdefault(key, len(self._places))
        if memory.untyped_storage().data_ptr() in self._may_be_live:
            self._live.setdefault(key, (whole, written, written._version))
            self._unread[key] = self._unread.get(key, 0) + memory.nbytes
        elif key not in self._copies:
            self._copy(key, whole)
            if memory.device.type != "cpu":
                self._device = memory.device

    def _copy(self, key: int, whole: Tensor) -> None:
        """Copy ``whole`` ``[n]`` into the buffer kept from the last save."""
        slot = self._places[key], whole.numel(), whole.dtype
        if slot not in self._buffers:
            self._buffers[slot] = host_empty_like(whole, whole.device)
        self._copies[key] = self._buffers[slot].copy_(whole, non_blocking=True)
        self.nbytes_copied += whole.nbytes


def _extent_of(part: Tensor) -> Tensor:
    """The memory from the first to the last element of ``part``, 1-D, including gaps."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    return part.detach().as_strided((extent,), (1,))


def _all_of(part: Tensor) -> Tensor:
    """The whole storage that ``part`` is a view of, 1-D."""
    numel = part.untyped_storage().nbytes() // part.element_size()
    return part.detach().as_strided((numel,), (1,), 0)
