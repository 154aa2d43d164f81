"""A bucket into which chunks are copied as they arrive, for the bucketer's fairscale interface."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fairshard.utils.collectives import communicator, exchange_tag


class ChunkBucket:
    """Chunks from the public interface, copied side by side; room for ``capacity`` columns."""

    def __init__(self, group: ProcessGroup, like: Tensor, capacity: int) -> None:
        self._comm = communicator(group)
        self._data = like.new_empty(self._comm.world_size, capacity)
        self._used = 0
        self._callbacks: list[tuple[int, torch.Size, Callable[[Tensor], object] | None]] = []

    @property
    def room(self) -> int:
        """Number of free columns."""
        return self._data.size(1) - self._used

    def add(self, chunks: Sequence[Tensor], callback: Callable[[Tensor], object] | None) -> None:
        """Copy one chunk per rank side by side; ``callback`` gets their sum."""
        stop = self._used + chunks[0].numel()
        torch._foreach_copy_(
            [row[self._used : stop] for row in self._data.unbind()], [chunk.reshape(-1) for chunk in chunks]
        )
        self._callbacks.append((self._used, chunks[0].shape, callback))
        self._used = stop

    def reduce(self) -> None:
        """Sum over ranks, and run the callbacks. **Collective.**"""
        if not self._callbacks:
            return
        full = self._data if not self.room else self._data[:, : self._used].contiguous()
        reduced = self._comm.reduce_scatter(full, exchange_tag("reduce_scatter", self._comm.new_id(), 0)).wait()
        assert reduced is not None
        reduced = reduced.to(self._data.dtype)
        for start, shape, callback in self._callbacks:
            if callback is not None:
                callback(reduced[start : start + shape.numel()].view(shape))
        self._callbacks.clear()
