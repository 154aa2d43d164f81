"""Reduce-scatter of many small gradients as few large buckets.

The engine lists the gradients in order beforehand. Consecutive ones of one kind share a bucket up to the cap, each
bucket is opened at its exact width, and gradients are written into the buffer that is sent::

    bucket [world_size, width]        | A: columns 0..a | B: columns a..a+b |
                              row 0   |  to rank 0      |  to rank 0        |
                              row 1   |  to rank 1      |  to rank 1        |

A plan is a hint: a gradient that was not planned, or that is reduced twice, gets its own bucket. At most two buckets
are in flight, and their sums are delivered in the order of launches.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from fairshard.utils.collectives import Communicators, exchange_tag
from fairshard.utils.storage import alloc_storage_, free_storage_
from fairshard.utils.streams import Event, Stream, now
from fairshard.utils.transfers import Chain, Transfer

MB = 1024 * 1024
_MAX_IN_FLIGHT = 2
MAX_STAGED_NBYTES = 1 << 18
"""Gradients of a source up to this size are first written end to end, and then copied to their columns at once."""


@dataclass(frozen=True)
class Division:
    """The divisors of gradients ``before`` and ``after`` the sum over ranks."""

    before: float
    after: float


class GradSource(Protocol):
    """The interface of a flat gradient that the bucketer uses; flat params implement it.

    Attributes:
        shard_numel: elements that this rank gets; all together get ``line.layout.padded_numel``, equal on all ranks.
        reduce_id, replica_id: identify it in the group that reduces, and in that of replicas.
        landing_dtype: the dtype of the mean for `accept_grad`; None: as the sum.
        lands_at_once: whether to wait for its mean right after sending, because a user's hook may communicate.
        line: the parts of the gradient that each rank gets, ``line.layout``; ``line.bucket_views(columns)`` are the
            parts of ``columns``, its part of a bucket, to which gradients are copied.
        bucket_kind: makes its buckets; a bucket has sources of one.
    """

    comms: Communicators
    reduce_dtype: torch.dtype
    compute_device: torch.device
    shard_numel: int
    reduce_id: int
    replica_id: int
    division: Division
    landing_dtype: torch.dtype | None
    lands_at_once: bool
    line: Any
    bucket_kind: Any

    def write_grads(self, views: list[list[Tensor]]) -> None:
        """Copy the gradients into ``views``, which ``line.bucket_views`` has made."""

    def take_kept(self) -> Tensor | None:
        """A tensor ``[shard_numel]`` to add to the sum before the sum over replicas; None from the second call on."""

    def accept_grad(self, reduced: Tensor) -> None:
        """Receive the mean over ranks of this rank's shard, ``[shard_numel]``; called in the order of launches."""


class Bucket:
    """Columns for the gradients of several sources, sent by one reduce-scatter; has memory only while ``is_open``.

    Small gradients in host memory that would fill many runs of their columns are written end to end first, to a stage,
    because a second copy of a few KiB takes less host time than a copy for each run.

    Attributes:
        missing: the indexes of sources that have not written since the memory was freed.
    """

    def __init__(self, sources: Sequence[GradSource]) -> None:
        first = sources[0]
        self.comms, self.sources = first.comms, tuple(sources)
        self.missing: set[int] = set()
        self._columns = self._make_columns()
        self._memory = [self.data]  # and the stage, if there is one
        self._targets = [self._target_of(*pair) for pair in zip(sources, self._columns, strict=True)]
        self._members = hash(tuple(source.reduce_id for source in sources)) & 0xFF
        self._uses = count(1)
        self._kept: list[Tensor] = []  # until `close`, because another stream may own the memory
        self.close()

    def _make_columns(self) -> Sequence[Any]:
        """Make `data`; returns the part of each source."""
        first, widths = self.sources[0], [source.shard_numel for source in self.sources]
        shape = self.comms.shard.world_size, sum(widths)
        self.data = torch.empty(shape, dtype=first.reduce_dtype, device=first.compute_device)
        columns: Sequence[Tensor] = self.data.split(widths, dim=1)
        return columns

    def _target_of(self, source: GradSource, columns: Any) -> tuple[Any, list[list[Tensor]]]:
        """Where ``source`` writes, its ``columns`` or the stage, and the parts of that."""
        is_small = isinstance(columns, Tensor) and columns.is_cpu and columns.nbytes <= MAX_STAGED_NBYTES
        if is_small and not columns.is_contiguous():
            if len(self._memory) == 1:
                self._memory.append(self.data.new_empty(MAX_STAGED_NBYTES // self.data.itemsize))
            stage = self._memory[1][: columns.numel()].view(columns.shape)
            views = source.line.bucket_views(stage)
            if all(run.is_contiguous() for runs in views for run in runs):
                return stage, views
        return columns, source.line.bucket_views(columns)

    @property
    def is_open(self) -> bool:
        """Whether any source has written since the memory was freed."""
        return len(self.missing) < len(self.sources)

    def write(self, index: int, zeros: bool = False) -> bool:
        """Make the source at ``index`` write its gradients, or ``zeros``; returns whether the bucket is complete."""
        if len(self.missing) == len(self.sources):
            for memory in self._memory:
                alloc_storage_(memory)
        columns = self._columns[index]
        if zeros:
            columns.zero_()
        else:
            source, (target, views) = self.sources[index], self._targets[index]
            source.write_grads(views)
            if target is not columns:
                columns.copy_(target)
            if source.division.before != 1:
                columns.div_(source.division.before)
        self.missing.discard(index)
        return not self.missing

    def launch(self) -> Transfer:
        """Start the sum over ranks, and over replicas if there are any; columns not written count as zeros."""
        for index in self.missing:
            self._columns[index].zero_()
        first, replicas, uses = self.sources[0], self.comms.replicas, next(self._uses)
        scatter = self._reduce(exchange_tag("reduce_scatter", first.reduce_id, uses, self._members))
        if replicas is None:
            return scatter
        tag = exchange_tag("reduce_scatter", first.replica_id, uses, self._members)

        def sum_over_replicas(reduced: Any) -> Transfer:
            return replicas.sum_over_ranks(self._add_kept(reduced), tag)

        is_ready = not scatter.works and scatter.result is not None  # on all ranks
        return sum_over_replicas(scatter.result) if is_ready else Chain(scatter, sum_over_replicas)

    def _reduce(self, tag: int) -> Transfer:
        return self.comms.reduce.reduce_scatter(self.data, tag)

    def deliver(self, reduced: Tensor) -> None:
        """Divide ``reduced`` ``[width]``, a sum, and pass its parts to the sources that have written."""
        factor, dtype = self.sources[0].division.after, self.sources[0].landing_dtype or reduced.dtype
        is_reused = self.comms.num_ranks > 1 and reduced.data_ptr() == self.data.data_ptr()
        if dtype != reduced.dtype or is_reused:  # divided and moved by one kernel
            reduced = torch.div(reduced, factor, out=torch.empty_like(reduced, dtype=dtype))
        elif factor != 1:
            reduced.div_(factor)
        for index, part in enumerate(self._parts(reduced)):
            if index not in self.missing:
                self.sources[index].accept_grad(part)

    def _parts(self, reduced: Tensor) -> Sequence[Tensor]:
        """The part of ``reduced`` ``[width]`` of each source."""
        parts: Sequence[Tensor] = reduced.split([source.shard_numel for source in self.sources])
        return parts

    def _add_kept(self, reduced: Tensor) -> Tensor:
        """Add what sources have kept to ``reduced``, in fp32 or wider, in place if it already has that dtype."""
        runs = [None if i in self.missing else source.take_kept() for i, source in enumerate(self.sources)]
        if any(run is not None for run in runs):
            reduced = reduced.to(torch.promote_types(reduced.dtype, torch.float32))
            for part, run in zip(self._parts(reduced), runs, strict=True):
                if run is not None:
                    self._kept.append(run)
                    part.add_(run)
        return reduced

    def close(self) -> None:
        """Free the memory, and expect all sources again."""
        for memory in self._memory:
            free_storage_(memory)
        self._kept.clear()
        self.missing.update(range(len(self.sources)))


def _kind(source: Any) -> tuple[object, ...]:
    """What the sources of one bucket have in common: how they are written, summed, divided and cast."""
    sent = source.comms, source.reduce_dtype, source.compute_device, source.bucket_kind
    return *sent, source.division, source.landing_dtype


def pack(order: Sequence[Any], bucket_cap_mb: float) -> list[list[Any]]:
    """Group ``order``, of `GradSource`, into buckets: consecutive ones of one `_kind` share a bucket up to the cap."""
    packed: list[list[Any]] = []
    filling: dict[tuple[object, ...], tuple[list[Any], int]] = {}
    for source in order:
        kind = _kind(source)
        own = source.line.layout.padded_numel * source.reduce_dtype.itemsize
        sources, nbytes = filling.get(kind, ([], 0))
        if not sources or nbytes + own > bucket_cap_mb * MB:
            sources, nbytes = [], 0
            packed.append(sources)
        sources.append(source)
        filling[kind] = sources, nbytes + own
    return packed


def is_crowded(nbytes: int, flying: Sequence[int], bucket_cap_mb: float) -> bool:
    """Whether a bucket must wait for memory: two are in flight, or all together have more than two caps of bytes."""
    return len(flying) >= _MAX_IN_FLIGHT or nbytes + sum(flying) > 2 * bucket_cap_mb * MB


class Bucketer:
    """Collects gradients into buckets of at most ``bucket_cap_mb`` MB (all ranks' shares together).

    ``bucket_cap_mb <= 0`` turns bucketing off. Sums are queued on ``stream``. One bucketer serves all units of a model;
    gradients of different process groups, dtypes, devices or divisors never share a bucket.
    """

    def __init__(self, bucket_cap_mb: float, stream: Stream) -> None:
        self.bucket_cap_mb = bucket_cap_mb
        self._stream = stream
        self._order: list[tuple[GradSource, tuple[object, ...]]] = []
        self._place: dict[GradSource, tuple[Bucket, int]] = {}
        self._flying: deque[tuple[Bucket, Transfer]] = deque()
        self.due: list[tuple[Bucket, Event]] = []  # complete at an event; sent after the next gather
        self.drops = False  # send zeros instead of gradients, and drop the sums
        self._error: Exception | None = None  # of a gradient or a hook: raised by `drain`, when all ranks have sent all

    def plan(self, order: Sequence[GradSource]) -> None:
        """Plan buckets for the gradients of ``order``, in that order; repeating the last plan costs nothing."""
        expected = [(source, _kind(source)) for source in order]
        if self._order == expected:
            return
        self._order = expected
        buckets = [sources[0].bucket_kind(sources) for sources in pack(order, self.bucket_cap_mb)]
        self._place = {source: (bucket, index) for bucket in buckets for index, source in enumerate(bucket.sources)}

    def reduce(self, source: GradSource, yields: bool = False) -> None:
        """Write the gradients of ``source`` to its bucket, and send the bucket if it is complete.

        ``source.accept_grad`` receives the mean when the bucket lands: at the latest in `drain`, before that to make
        room or once the sum is complete; on an accelerator that is queued at launch. With one rank it runs here. If the
        gradients cannot be written, zeros are sent, and `drain` raises.
        ``yields``: a gather follows. On an accelerator, a bucket of several sources then waits for `send_due`, because
        its sum would hold up the gather, which compute needs sooner.
        """
        self.send_due()
        if source.comms.num_ranks == 1:
            alone = source.bucket_kind([source])
            if alone.write(0, zeros=self.drops) and not self.drops:
                alone.deliver(alone.data[0])
            return
        bucket, index = self._place.get(source, (None, 0))
        if bucket is None or index not in bucket.missing:
            bucket, index = source.bucket_kind([source]), 0
        while self._flying and (self._flying[0][1].is_completed() or self._is_crowded(bucket)):
            self._land()
        try:
            is_complete = bucket.write(index, zeros=self.drops)
        except Exception as error:  # the other ranks wait for what this one has to send
            self._error = self._error or error
            is_complete = bucket.write(index, zeros=True)
        if not is_complete:
            return
        if yields and len(bucket.sources) > 1 and not bucket.data.is_cpu:
            self.due.append((bucket, now(bucket.data.device)))
        else:
            self.launch(bucket)
            if bucket.data.is_cpu and any(source.lands_at_once for source in bucket.sources):
                self._land_all()

    def send_due(self) -> None:
        """Send the bucket that has waited for a gather, if any."""
        if self.due:
            self.launch(*self.due.pop())

    def drain(self) -> None:
        """Send all waiting buckets, full or not, and wait for all sums; raise what a gradient or a hook has raised."""
        self.send_due()
        flying = [bucket for bucket, _ in self._flying]
        for bucket in dict.fromkeys([bucket for bucket, _ in self._place.values()]):
            if bucket.is_open and bucket not in flying:
                self.launch(bucket)
        self._land_all()
        error, self._error = self._error, None
        if error is not None and not self.drops:
            raise error

    def reset(self) -> None:
        """Drop the buckets of an interrupted backward, after waiting for those in flight."""
        self.due.clear()
        self._error = None
        while self._flying:
            self._flying.popleft()[1].wait()
        for bucket, _ in self._place.values():
            bucket.close()

    def launch(self, bucket: Bucket, written: Event | None = None) -> None:
        """Start the sum of ``bucket`` over ranks; on an accelerator also queue its delivery.

        ``written``: when its last gradient was in it; None: after all work queued so far.
        """
        self._stream.wait(written or now(bucket.data.device))
        with self._stream.use():
            transfer = bucket.launch()
            if bucket.data.is_cpu:
                self._flying.append((bucket, transfer))
                return
            try:  # ordered by the stream: delivery is queued now, and the host never waits
                self.deliver(bucket, transfer)
            finally:
                self._flying.append((bucket, Transfer((self._stream.record(),))))

    def deliver(self, bucket: Bucket, transfer: Transfer) -> None:
        """Wait for ``transfer``, and pass its result to the sources of ``bucket``."""
        reduced = transfer.wait()
        assert reduced is not None
        if not self.drops and self._error is None:
            try:
                bucket.deliver(reduced)
            except Exception as error:  # of a hook: the other ranks wait for what this one still has to send
                self._error = error

    def _is_crowded(self, bucket: Bucket) -> bool:
        """Whether ``bucket`` has no memory yet, and must wait for it."""
        flying = [each.data.nbytes for each, _ in self._flying]
        return not bucket.is_open and is_crowded(bucket.data.nbytes, flying, self.bucket_cap_mb)

    def _land_all(self) -> None:
        while self._flying:
            self._land()

    def _land(self) -> None:
        """Finish the oldest bucket in flight."""
        bucket, transfer = self._flying.popleft()
        if bucket.data.is_cpu:
            self.deliver(bucket, transfer)
        else:
            transfer.wait()  # invariant: the bucket's memory is not reused before the reduce stream has read it
        bucket.close()
