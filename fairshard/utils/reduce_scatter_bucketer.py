"""fairscale's bucketer: chunks are copied into buckets as they arrive, in any order; the engine's is in ``buckets.py``.

Each chunk is copied, and a partial flush copies once more.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fairshard.utils.collectives import exchange_tag
from fairshard.utils.groups import communicator

__all__ = ["ReduceScatterBucketer"]

MB = 1024 * 1024


class ChunkBucket:
    """Chunks, copied side by side; room for ``capacity`` columns."""

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


class ReduceScatterBucketer:
    """Collects chunks into buckets of at most ``bucket_cap_mb`` MB (all ranks' shares together), by group and dtype.

    ``bucket_cap_mb <= 0`` turns bucketing off.
    """

    def __init__(self, bucket_cap_mb: float = 25) -> None:
        self.bucket_cap_mb = bucket_cap_mb
        self._chunks: dict[tuple[ProcessGroup, torch.dtype, torch.device], ChunkBucket] = {}

    @torch.no_grad()
    def reduce_scatter_async(
        self,
        input_list: Sequence[Tensor],
        group: ProcessGroup,
        callback_fn: Callable[[Tensor], object] | None = None,
    ) -> None:
        """Sum ``input_list[rank]`` over ranks, and call ``callback_fn(reduced)`` with this rank's sum, not the mean.

        Inputs smaller than the cap wait until their bucket is full or ``flush`` is called; other inputs are sent
        immediately, before those that wait. When this or `flush` returns, the callbacks of all inputs sent so far have
        run.

        **Collective**: every rank of ``group`` passes tensors of the same sizes, in the same order.

        Raises:
            ValueError: there is not one tensor per rank, or their sizes differ.
        """
        world_size = communicator(group).world_size
        if len(input_list) != world_size:
            raise ValueError(
                f"`input_list` must hold one tensor for each rank of the group, but holds {len(input_list)} for "
                f"{world_size} ranks. Cut the gradient with fairshard.utils.parallel.chunk_and_pad."
            )
        first = input_list[0]
        if any(chunk.numel() != first.numel() for chunk in input_list):
            raise ValueError(
                "The tensors of `input_list` must all have the same number of elements, but have "
                f"{[chunk.numel() for chunk in input_list]}. Pad them (chunk_and_pad does)."
            )
        cap = self.bucket_cap_mb * MB
        if cap <= 0 or first.nbytes * world_size >= cap:
            bucket = ChunkBucket(group, first, first.numel())
            bucket.add(input_list, callback_fn)
            bucket.reduce()
            return
        key = (group, first.dtype, first.device)
        waiting = self._chunks.get(key)
        if waiting is not None and first.numel() > waiting.room:
            waiting.reduce()
            waiting = None
        if waiting is None:
            capacity = int(cap / (first.element_size() * world_size))
            waiting = self._chunks[key] = ChunkBucket(group, first, capacity)
        waiting.add(input_list, callback_fn)

    def flush(self) -> None:
        """Send all waiting buckets, full or not, wait for their sums, and run their callbacks. **Collective.**"""
        for waiting in self._chunks.values():
            waiting.reduce()
        self._chunks.clear()
