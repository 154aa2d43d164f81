"""What is saved, as it is at one moment, while training goes on.

Two ways. Tensors on a GPU, or in memory that the next step writes at once, are copied to host memory, into buffers
that serve again for the next save. Masters in host memory (``cpu_offload``, ``move_grads_to_cpu``) are not: the
writer reads them where they are, and the next step of any optimizer first copies what has not been read by then.
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
from fairshard.utils.device import now
from fairshard.utils.dtensors import memory_of
from fairshard.utils.pinned import host_empty_like
from fairshard.utils.span_tensor import SpanTensor

Buffers = dict[tuple[int, int, torch.dtype], Tensor]


class Snapshot:
    """Tensors of one moment. ``entries`` is what to write: nested dicts of tensors, span tensors and objects.

    ``buffers`` keeps host memory from save to save; None copies nothing, for nothing changes. ``live`` are the storages
    (by `data_ptr`) that may be read where they are; all others are copied now.
    """

    def __init__(self, entries: Mapping[str, Any], buffers: Buffers | None, live: set[int]) -> None:
        self._buffers: Buffers = {} if buffers is None else buffers
        self._lock = threading.Lock()
        self._live: dict[int, tuple[Tensor, Tensor, int]] = {}  # what is read, what counts writes to it, how many
        self._copies: dict[int, Tensor] = {}
        self._places: dict[int, int] = {}  # of storages, among all of them: the same in every save of a model
        self._unread: dict[int, int] = {}  # bytes, of storages that are read where they are
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
        """``part``, a view of what `entries` holds, as it was; each once, on a writer's thread."""
        if not part.numel():
            return part
        key = part.data_ptr()
        if key not in self._places:
            key = part.untyped_storage().data_ptr()
        with self._lock:
            copy = self._copies.get(key)
            if copy is not None:
                start = (part.data_ptr() - key) // part.element_size()
                return copy.as_strided(part.shape, part.stride(), start)
            if key not in self._unread:
                return part
            self._unread[key] -= part.nbytes
            self._check(key)
            if self._unread[key] <= 0:
                self._live.pop(key, None)
            return part.clone()

    def copy_rest(self) -> None:
        """Copy what has not been written yet: it is about to change."""
        with self._lock:
            for key in list(self._live):
                self._check(key)
                self._copy(key, self._live.pop(key)[0])

    def _check(self, key: int) -> None:
        _, written, version = self._live[key]
        if written._version != version:
            raise CheckpointError(
                "While parameters and optimizer state are saved in the background only optimizers may change them, but "
                "something else did. Call Checkpointer.wait() before such a change."
            )

    def close(self) -> None:
        """Nothing is read any more."""
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
        """Copy all that ``value`` is a part of here, once; or note that it is to be read where it is.

        That is the whole shard that a run lies in. Of a DTensor it is its own elements, for each is copied by itself.
        """
        memory = memory_of(value)
        whole = _all_of(memory) if isinstance(value, SpanTensor) else _extent_of(memory)
        # What is written through a DTensor counts there, and not in the memory that it shows.
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
        """Copy ``whole`` ``[n]`` to memory that is there from the save before."""
        slot = self._places[key], whole.numel(), whole.dtype
        if slot not in self._buffers:
            self._buffers[slot] = host_empty_like(whole, whole.device)
        self._copies[key] = self._buffers[slot].copy_(whole, non_blocking=True)
        self.nbytes_copied += whole.nbytes


def _extent_of(part: Tensor) -> Tensor:
    """``part`` in the order of memory, 1-D, with what lies between its elements."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    return part.detach().as_strided((extent,), (1,))


def _all_of(part: Tensor) -> Tensor:
    """The whole storage that ``part`` is a view of, 1-D."""
    numel = part.untyped_storage().nbytes() // part.element_size()
    return part.detach().as_strided((numel,), (1,), 0)
