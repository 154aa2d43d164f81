"""Reduce-scatter of many small tensors as few large ones.

There are two interfaces. fairscale's, in ``chunk_bucket.py``, accepts chunks in any order, and copies them. The
engine's is planned: the engine lists the gradients in order beforehand, each bucket is opened at its exact width, and
gradients are written directly into the buffer that is sent::

    bucket [world_size, width]        | A: columns 0..a | B: columns a..a+b |
                              row 0   |  to rank 0      |  to rank 0        |
                              row 1   |  to rank 1      |  to rank 1        |

A plan is a hint: a gradient that was not planned, or that is reduced twice, gets its own bucket.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fairshard.utils.bucket_plan import PlannedSource, is_crowded, pack
from fairshard.utils.chunk_bucket import ChunkReducer
from fairshard.utils.collectives import Communicators, exchange_tag
from fairshard.utils.first_error import FirstError
from fairshard.utils.grad_writer import GradWriter
from fairshard.utils.storage import alloc_storage_, free_storage_, is_same_memory
from fairshard.utils.streams import Event, Stream, now
from fairshard.utils.tensors import add_runs
from fairshard.utils.transfers import Chain, Transfer

__all__ = ["ReduceScatterBucketer"]

Hook = Callable[[Tensor, Tensor], object]
"""``hook(flat, shard)`` reduces ``flat`` ``[world_size * shard_numel]`` into ``shard`` ``[shard_numel]``."""


@dataclass(frozen=True)
class Division:
    """The divisors of gradients ``before`` and ``after`` the sum over ranks."""

    before: float
    after: float


class GradSource(PlannedSource, Protocol):
    """The interface of a flat gradient that the bucketer uses; flat params implement it."""

    comms: Communicators
    reduce_id: int
    """Identifies the source in the group that reduces; ``replica_id`` does so in the group of replicas."""
    replica_id: int
    division: Division
    hook: Hook | None
    landing_dtype: torch.dtype | None
    """The dtype of the mean for `accept_grad`; None: as the sum."""
    lands_at_once: bool
    """Whether to wait for its mean right after sending, because a user's hook may communicate."""

    @property
    def layout(self) -> Any:
        """The parts of the gradient that each rank gets."""

    def bucket_views(self, columns: Any) -> list[list[Tensor]]:
        """The parts of ``columns``, its part of a bucket, to which gradients are copied."""

    def write_grads(self, views: list[list[Tensor]]) -> None:
        """Copy the gradients into ``views``, which `bucket_views` has made."""

    def take_kept(self) -> Tensor | None:
        """A tensor ``[shard_numel]`` to add to the sum before the sum over replicas; None from the second call on."""

    def accept_grad(self, reduced: Tensor) -> None:
        """Receive the mean over ranks of this rank's shard, ``[shard_numel]``; called in the order of launches."""


class Bucket:
    """Columns for the gradients of several sources, sent by one reduce-scatter; has memory only while ``is_open``."""

    def __init__(self, sources: Sequence[GradSource]) -> None:
        first = sources[0]
        self.comms = first.comms
        self.sources = tuple(sources)
        self._missing = set(range(len(sources)))
        self._kept: list[Tensor | None] = []  # sums that were added; until `close`: another stream may own the memory
        self._columns = self._make_columns()
        self._writers = [GradWriter(*pair) for pair in zip(sources, self._columns, strict=True)]
        self._members = hash(tuple(source.reduce_id for source in sources)) & 0xFF
        self._uses = 0
        self.nbytes = self.data.nbytes
        self.is_open = False
        self.written: Event | None = None  # when its last gradient was in it; None: all work queued so far
        free_storage_(self.data)

    def _make_columns(self) -> Sequence[Any]:
        """Make `data`; returns the part of each source."""
        first, widths = self.sources[0], [source.shard_numel for source in self.sources]
        shape = self.comms.shard.world_size, sum(widths)
        self.data = torch.empty(shape, dtype=first.reduce_dtype, device=first.compute_device)
        columns: Sequence[Tensor] = self.data.split(widths, dim=1)
        return columns

    def is_missing(self, index: int) -> bool:
        """Whether the source at ``index`` has not written since the bucket was opened."""
        return index in self._missing

    def write(self, index: int, zeros: bool = False) -> bool:
        """Make the source at ``index`` write its gradients, or ``zeros``; returns whether the bucket is complete."""
        if not self.is_open:
            alloc_storage_(self.data)
            self.is_open = True
        self._columns[index].zero_() if zeros else self._writers[index].write()
        self._missing.discard(index)
        return not self._missing

    def launch(self) -> Transfer:
        """Start the sum over ranks, and over replicas if there are any; columns not written count as zeros."""
        for index in self._missing:
            self._columns[index].zero_()
        self._uses += 1
        first, replicas = self.sources[0], self.comms.replicas
        scatter = self._reduce(exchange_tag("reduce_scatter", first.reduce_id, self._uses, self._members))
        if replicas is None:
            return scatter
        tag = exchange_tag("reduce_scatter", first.replica_id, self._uses, self._members)
        if self.comms.shard.world_size == 1:
            return replicas.sum_over_ranks(self._with_kept(self.data[0]), tag)
        return Chain(scatter, lambda reduced: replicas.sum_over_ranks(self._with_kept(reduced), tag))

    def _reduce(self, tag: int) -> Transfer:
        return self.comms.reduce.reduce_scatter(self.data, tag)

    def _with_kept(self, reduced: Tensor) -> Tensor:
        """``reduced`` ``[width]``, plus sums of earlier backwards that wait for the sum over replicas."""
        self._kept = [None if i in self._missing else source.take_kept() for i, source in enumerate(self.sources)]
        return add_runs(reduced, self._kept, [source.shard_numel for source in self.sources])

    def deliver(self, reduced: Tensor) -> None:
        """Divide ``reduced`` ``[width]``, a sum, and pass its parts to the sources that have written."""
        if self.comms.shard.world_size == 1 < self.comms.num_ranks and is_same_memory(reduced, self.data[0]):
            reduced = reduced.clone()  # the bucket's memory is reused
        factor, *others = {source.division.after for source in self.sources}
        dtype, *dtypes = {source.landing_dtype for source in self.sources}
        if not others and not dtypes and dtype not in (None, reduced.dtype):
            wide = torch.empty_like(reduced, dtype=dtype)  # divided and cast by one kernel
            reduced = torch.div(reduced, factor, out=wide) if factor != 1 else wide.copy_(reduced)
        elif not others and factor != 1:
            reduced.div_(factor)
        parts = reduced.split([source.shard_numel for source in self.sources])
        for source, part in zip(self.sources, parts, strict=True) if others else ():
            part.div_(source.division.after)
        for index, source in enumerate(self.sources):
            if index not in self._missing:
                source.accept_grad(parts[index])

    def close(self) -> None:
        """Free the memory, and expect all sources again."""
        free_storage_(self.data)
        self._kept = []
        self.is_open = False
        self.written = None
        self._missing = set(range(len(self.sources)))


class ReduceScatterBucketer(ChunkReducer):
    """Collects gradients into buckets of at most ``bucket_cap_mb`` MB (all ranks' shares together).

    ``bucket_cap_mb <= 0`` turns bucketing off. One bucketer serves all units of a model; gradients of different
    process groups, dtypes or devices never share a bucket.
    """

    def __init__(self, bucket_cap_mb: float = 25, stream: Stream | None = None) -> None:
        super().__init__(bucket_cap_mb)
        self._stream = stream or Stream(torch.device("cpu"))
        self._order: list[tuple[GradSource, Communicators]] = []
        self._place: dict[GradSource, tuple[Bucket, int]] = {}
        self._flying: deque[tuple[Bucket, Transfer, Event]] = deque()
        self.due: Bucket | None = None  # complete; sent after the next gather
        self.drops = False  # send zeros instead of gradients, and drop the sums
        self._error = FirstError()  # of a user's hook; later sums are dropped

    def plan(self, order: Sequence[GradSource]) -> None:
        """Plan buckets for the gradients of ``order``, in that order; repeating the last plan costs nothing."""
        expected = [(source, source.comms) for source in order]
        if self._order == expected:
            return
        self._order = expected
        self._place = {}
        for sources in pack(order, self.bucket_cap_mb):
            bucket = sources[0].bucket_kind(sources)
            for index, source in enumerate(sources):
                self._place[source] = bucket, index

    def reduce(self, source: GradSource, yields: bool = False) -> None:
        """Write the gradients of ``source`` to its bucket, and send the bucket if it is complete.

        ``source.accept_grad`` receives the mean after a wait: when two buckets are in flight, or in `flush`.
        ``yields``: a gather follows. On an accelerator, a bucket of several sources then waits for `send_due`, because
        its sum would hold up the gather, which compute needs sooner.
        """
        if self.due is not None:
            self.send_due()
        if source.hook is not None:
            self.reduce_by_hook(source, source.hook)
            return
        if source.comms.num_ranks == 1:
            if not self.drops:
                alone = source.bucket_kind([source])
                alone.write(0)
                alone.deliver(alone.data[0])
            return
        bucket, index = self._place.get(source, (None, 0))
        if bucket is None or not bucket.is_missing(index):
            bucket, index = source.bucket_kind([source]), 0
        while self._flying and (self._has_ended() or self._is_crowded(bucket)):
            self._land()
        if not bucket.write(index, zeros=self.drops):
            return
        if yields and len(bucket.sources) > 1 and not bucket.data.is_cpu:
            bucket.written = now(bucket.data.device)
            self.due = bucket
        else:
            self.launch(bucket)
            lands = bucket.data.is_cpu and any(source.lands_at_once for source in bucket.sources)
            while lands and self._flying:
                self._land()

    def send_due(self) -> None:
        """Send the bucket that has waited for a gather, if any."""
        due, self.due = self.due, None
        if due is not None:
            self.launch(due)

    def flush(self) -> None:
        """Send all waiting buckets, full or not, wait for all sums, and run their callbacks."""
        self.reduce_chunks()
        self.drain()

    def drain(self) -> None:
        """Send all waiting planned buckets, full or not, and wait for all sums; raise what a hook raised."""
        self.send_due()
        for bucket in {id(bucket): bucket for bucket, _ in self._place.values()}.values():
            if bucket.is_open and all(bucket is not flying for flying, _, _ in self._flying):
                self.launch(bucket)
        while self._flying:
            self._land()
        self._error.raise_kept(self.drops)

    def reset(self) -> None:
        """Drop the buckets of an interrupted backward, after waiting for those in flight."""
        self._chunks.clear()
        self.due = self._error.kept = None
        while self._flying:
            bucket, transfer, done = self._flying.popleft()
            transfer.wait()
            done.wait()
            bucket.close()
        for bucket, _ in self._place.values():
            bucket.close()

    def reduce_by_hook(self, source: GradSource, hook: Hook) -> None:
        """Reduce with ``hook``, on the reduce stream; the hook does all averaging."""
        bucket = Bucket([source])
        bucket.write(0, zeros=self.drops)
        with self._stream.in_turn(bucket.data.device):
            reduced = bucket.data.new_empty(source.shard_numel)
            hook(bucket.data.view(-1), reduced)
            if not self.drops:
                source.accept_grad(reduced)

    def launch(self, bucket: Bucket) -> None:
        """Start the sum of ``bucket`` over ranks; on an accelerator also queue its delivery."""
        self._stream.wait(bucket.written or now(bucket.data.device))
        with self._stream.use():
            transfer = bucket.launch()
            try:
                if not bucket.data.is_cpu:  # ordered by the stream: delivery is queued now, and the host never waits
                    self.deliver(bucket, transfer)
                    transfer.result = None  # its memory is needed no more; the stream keeps the order
            finally:  # also if a user's hook raises: `reset` waits for it
                self._flying.append((bucket, transfer, self._stream.record()))

    def deliver(self, bucket: Bucket, transfer: Transfer) -> None:
        """Wait for ``transfer``, and pass its result to the sources of ``bucket``."""
        reduced = transfer.wait()
        assert reduced is not None
        if not self.drops and self._error.kept is None:
            with self._error:
                bucket.deliver(reduced)

    def _has_ended(self) -> bool:
        """Whether the oldest bucket in flight is reduced: on an accelerator, whether its stream is that far."""
        bucket, transfer, done = self._flying[0]
        return transfer.is_completed() if bucket.data.is_cpu else done.has_passed()

    def _is_crowded(self, bucket: Bucket) -> bool:
        if bucket.is_open:
            return False
        return is_crowded(bucket.nbytes, [flying.nbytes for flying, _, _ in self._flying], self.bucket_cap_mb)

    def _land(self) -> None:
        """Finish the oldest bucket in flight."""
        bucket, transfer, done = self._flying.popleft()
        if bucket.data.is_cpu:
            self.deliver(bucket, transfer)
        done.wait()  # invariant: the bucket's memory is not reused before the reduce stream has read it
        bucket.close()
