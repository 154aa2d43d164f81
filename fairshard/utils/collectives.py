"""The collectives of training, chosen by backend and world size.

Those of rows of unequal width are in ``unequal_rows.py``, other messages in ``messages.py``. Only these files and
``groups.py``, which makes the groups, call collectives of torch.distributed.

======================  =========================================  =======================================
backend, ranks          all-gather                                 reduce-scatter (always a *sum*)
======================  =========================================  =======================================
any, 1                  nothing                                    nothing
gloo, 2 to 4            direct exchange of rows                    direct exchange, local sum in rank order
gloo, more              all_gather_single                          all_to_all_single, local sum
NCCL and others         all_gather_single                          reduce_scatter_single
======================  =========================================  =======================================

A direct exchange is one ``isend`` and one ``irecv`` per peer, directly between rows: gloo's own all-gather and
reduce-scatter copy more and take two to five times as long (``benchmarks/micro/collectives.py``). It has its own
process group. Local sums add in rank order, in fp32 for narrower dtypes, so that they do not depend on timing.
"""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fairshard.errors import FairshardError
from fairshard.utils.failures import explained
from fairshard.utils.streams import now
from fairshard.utils.transfers import Chain, Ready, Transfer, Works, wait_all

__all__ = ["counters", "reset_counters"]

# Four ranks on two cores: below this many bytes gloo's own all-gather is faster (docs/notes/collectives.md).
_EXCHANGE_MIN_BYTES_AT_FOUR = 1 << 20

# Methods of the group, not functions of torch.distributed, which cost twice as much host time. Renamed in torch
# 2.13; the old names can go with support for torch < 2.13.
GATHER = "all_gather_single" if hasattr(ProcessGroup, "all_gather_single") else "_allgather_base"
"""The method of a group that gathers tensors into one."""
SCATTER = "reduce_scatter_single" if hasattr(ProcessGroup, "reduce_scatter_single") else "_reduce_scatter_base"
"""The method of a group that sums tensors over ranks and gives each rank its part."""

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "agreement", "all_to_all"]


def exchange_tag(kind: Kind, source: int, uses: int, members: int = 0) -> int:
    """A tag of 31 bits that distinguishes running exchanges, the same on every rank.

    ``source`` identifies the tensor, ``uses`` counts its exchanges, ``members`` is a hash of the tensors sent with it.
    Not a sequence number: ranks that start exchanges in different orders would silently receive wrong data.
    """
    return (kind == "reduce_scatter") << 30 | (source & 0x3FFF) << 16 | (members & 0xFF) << 8 | uses & 0xFF


class Communicator:
    """A process group with this rank's number in it, its collectives and their counts; see `groups.communicator`.

    ``backend``: of tensors in host memory; None if there is none. ``exchange``: a group of the same ranks for direct
    exchanges, if they are used.

    Attributes:
        engines: what runs models whose first group this is, by the rest of what they run on.
        unfinished: works of dropped models, kept as long as the group; see `Works`.
        is_real: whether data moves.
    """

    def __init__(self, group: ProcessGroup, backend: str | None, exchange: ProcessGroup | None = None) -> None:
        self._group = weakref.ref(group)  # registries are keyed by it: a strong reference would keep both forever
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.backend = backend
        self.is_real, self.is_gloo = backend != "fake", backend == "gloo"
        self.exchange = exchange
        self.engines: dict[tuple[Any, ...], Any] = {}
        self.unfinished: list[Any] = []
        self.counts: dict[str, tuple[int, int]] = {}
        self._next_id = self._num_messages = 0
        self._host: Communicator | None = None

    @property
    def group(self) -> ProcessGroup:
        """The process group; users of a communicator keep its group alive."""
        group = self._group()
        if group is None:
            raise FairshardError("The process group of a model was destroyed while the model was in use.")
        return group

    @property
    def host(self) -> "Communicator":
        """The same ranks, for tensors in host memory: itself, unless its backend has none (see `groups.on_host`)."""
        return self if self._host is None else self._host

    def connect_host(self, host: "Communicator") -> None:
        """Use ``host`` for tensors in host memory."""
        self._host, self._host_group = host, host.group

    def gather_objects(self, value: Any) -> list[Any]:
        """``value`` of every rank, pickled. **Collective**; for error messages, never on the fast path."""
        return gather_objects(value, self.group)

    def gather_messages(self, rows: Tensor) -> Transfer:
        """See `all_gather`. Counted separately; only one at a time. **Collective.**"""
        self._num_messages += 1
        return RowGather(self, rows, "agreement").start(exchange_tag("all_gather", 0, self._num_messages))

    def new_id(self) -> int:
        """A number for one flat param, equal on all ranks if they build their models in the same order."""
        self._next_id += 1
        return self._next_id

    def all_gather(self, buffer: Tensor, tag: int) -> Transfer:
        """Fill each row of ``buffer`` ``[world_size, shard_numel]``, in place, from the rank that owns it.

        **Collective.** This rank's row is already written. ``tag`` identifies the exchange: equal on all ranks, and
        different from the tag of every other running exchange.
        """
        return RowGather(self, buffer).start(tag)

    @explained
    def reduce_scatter(self, bucket: Tensor, tag: int) -> Transfer:
        """The sum over ranks of row ``rank`` of ``bucket`` ``[world_size, width]``: ``[width]``, in memory of its own.

        **Collective.** For fp16 and bf16 the sum is fp32 (except for bf16 on backends that sum themselves).
        The caller keeps ``bucket`` until it has been waited for. ``tag``: see `all_gather`.
        """
        self.count("reduce_scatter", bucket.nbytes - bucket.nbytes // self.world_size)
        if self.world_size == 1:
            return Transfer(result=bucket[0])
        if not self.is_gloo or not bucket.is_cpu:
            return self._scatter_native(bucket)
        if self.exchange is None:
            received = torch.empty_like(bucket)
            works = [dist.all_to_all_single(received.view(-1), bucket.view(-1), group=self.group, async_op=True)]
            return Transfer(works, finish=lambda: sum_in_order(list(received)))
        works, rows = self._exchange_rows(self.exchange, bucket, tag)
        return Transfer(works, finish=lambda: sum_in_order(rows, into=rows[self.rank == 0]))

    @explained
    def sum_over_ranks(self, tensor: Tensor, tag: int) -> Transfer:
        """The sum over ranks of ``tensor`` ``[width]``, in rank order, like that of `reduce_scatter`. **Collective.**

        The caller keeps ``tensor`` until it has been waited for; on backends that sum themselves ``tensor`` may hold
        the result. ``tag``: see `all_gather`.
        """
        self.count("all_reduce", tensor.nbytes)
        if self.world_size == 1:
            return Transfer(result=tensor)
        if not self.is_gloo or not tensor.is_cpu:
            return self._sum_native(tensor)
        if self.exchange is not None:
            works, rows = self._exchange_rows(self.exchange, tensor.expand(self.world_size, -1), tag)
            return Transfer(works, finish=lambda: sum_in_order(rows, into=rows[self.rank == 0]))
        width = -(-tensor.numel() // self.world_size)
        sent, received = tensor.new_zeros(2, self.world_size, width)  # one memory: `received` keeps what is sent
        sent.view(-1)[: tensor.numel()] = tensor
        works = [dist.all_to_all_single(received.view(-1), sent.view(-1), group=self.group, async_op=True)]

        def gather(part: Tensor) -> Transfer:
            line = part.new_empty(self.world_size * width)
            work = getattr(self.group, GATHER)(line, part)
            return Transfer((work,), line[: tensor.numel()])

        return Chain(Transfer(works, finish=lambda: sum_in_order(list(received))), gather)

    @explained
    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max", "min"] = "sum") -> Transfer:
        """Combine ``tensor`` over all ranks, in place. **Collective.**"""
        self.count("all_reduce", tensor.nbytes)
        if self.world_size == 1:
            return Transfer(result=tensor)
        work = dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op.upper()), group=self.group, async_op=True)
        return Transfer((work,), tensor)

    def _sum_native(self, tensor: Tensor) -> Transfer:
        """The backend's own all-reduce; divides fp16 first."""
        power = self.divide_fp16(tensor)
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        if power > 1:
            return Transfer((work,), finish=lambda: tensor.float().mul_(power))
        return Transfer((work,), tensor)

    def divide_fp16(self, tensor: Tensor) -> float:
        """Divide an fp16 ``tensor`` by a power of two, which is exact, to avoid overflow of sums; returns the power."""
        power = 2.0 ** math.ceil(math.log2(self.world_size)) if tensor.dtype == torch.float16 else 1.0
        if power > 1:
            tensor.div_(power)
        return power

    def _scatter_native(self, bucket: Tensor) -> Transfer:
        """The backend's own reduce-scatter; divides fp16 first."""
        reduced = bucket.new_empty(bucket.size(1))
        power = self.divide_fp16(bucket)
        work = getattr(self.group, SCATTER)(reduced, bucket.view(-1))
        if power > 1:
            return Transfer((work,), finish=lambda: reduced.float().mul_(power))
        return Transfer((work,), reduced)

    def _exchange_rows(self, exchange: ProcessGroup, bucket: Tensor, tag: int) -> tuple[list[Any], list[Tensor]]:
        """Send row ``i`` to rank ``i``; returns the works, and the rows to sum in rank order."""
        rows = [bucket.new_empty(bucket.size(1)) for _ in range(1, self.world_size)]
        works = Works(self.unfinished)
        try:
            for step in range(1, self.world_size):
                source, target = (self.rank - step) % self.world_size, (self.rank + step) % self.world_size
                row = rows[source if source < self.rank else source - 1]
                works.append(exchange.recv([row], source, tag))
                works.append(exchange.send([bucket[target]], target, tag))
        except Exception as error:
            wait_all(works, error)
        rows.insert(self.rank, bucket[self.rank])
        return works, rows

    def count(self, kind: Kind, nbytes: int) -> None:
        """Count one collective and the bytes that it moves."""
        if self.world_size > 1:
            number, total = self.counts.get(kind, (0, 0))
            self.counts[kind] = number + 1, total + nbytes


@dataclass(frozen=True)
class Communicators:
    """The groups that communicate one sharded tensor.

    ``shard``: the ranks among which it is cut. ``reduce``: the same ranks, for gradients. ``replicas``: the ranks that
    hold the same piece, or None.
    """

    shard: Communicator
    reduce: Communicator
    replicas: Communicator | None = None

    @cached_property
    def num_ranks(self) -> int:
        """Number of ranks over which a gradient is averaged."""
        return self.shard.world_size * (1 if self.replicas is None else self.replicas.world_size)


UserGather = Callable[["RowGather"], "RowGather"]
"""Makes a gather of the same rows that the user defines; see ``custom_comms.py``."""


class RowGather:
    """An all-gather of the rows of one buffer, prepared for repeated use."""

    __slots__ = ("_exchange", "_kind", "_line", "_native", "_nbytes", "_own", "_peers", "buffer", "comm")

    def __init__(self, comm: Communicator, buffer: Tensor, kind: Kind = "all_gather") -> None:
        self.comm = comm
        self._kind: Kind = kind
        self.buffer = buffer
        self._line = buffer.view(-1)
        self._own = buffer[comm.rank]
        self._nbytes = buffer.nbytes - buffer.nbytes // comm.world_size
        small = comm.world_size == 4 and buffer.nbytes < _EXCHANGE_MIN_BYTES_AT_FOUR
        self._exchange = None if small or not buffer.is_cpu else comm.exchange
        self._native = getattr(comm.group, GATHER)
        distances = range(1, comm.world_size)
        sources = [(comm.rank - distance) % comm.world_size for distance in distances]
        targets = [(comm.rank + distance) % comm.world_size for distance in distances]
        self._peers = [(source, buffer[source], target) for source, target in zip(sources, targets, strict=True)]

    def through(self, user: UserGather | None) -> "RowGather":
        """This gather, or that of ``user``, which replaces it."""
        return self if user is None else user(self)

    @explained
    def start(self, tag: int) -> Transfer:
        """Gather; this rank's row is already written. See `Communicator.all_gather`."""
        comm = self.comm
        if comm.world_size == 1:  # nothing is sent, but this stream may have just written the row
            return Ready(now(self.buffer.device), self.buffer)
        comm.count(self._kind, self._nbytes)
        exchange = self._exchange
        if exchange is None:
            return Transfer((self._native(self._line, self._own),), self.buffer)
        works = Works(comm.unfinished)
        try:
            for source, row, target in self._peers:
                works.append(exchange.recv([row], source, tag))
                works.append(exchange.send([self._own], target, tag))
        except Exception as error:
            wait_all(works, error)
        return Transfer(works, self.buffer)


communicators: "weakref.WeakKeyDictionary[ProcessGroup, Communicator]" = weakref.WeakKeyDictionary()
"""The only `Communicator` of each group; see `groups.communicator`."""


def counters() -> dict[str, tuple[int, int]]:
    """Collectives of this process since the last `reset_counters`: ``{kind: (number, bytes)}``.

    Bytes are those received by an all-gather, those sent by a reduce-scatter or an all-to-all, and the size of the
    tensor for an all-reduce. A direct exchange counts once. Groups of one rank are not counted.
    """
    totals: dict[str, tuple[int, int]] = {}
    for comm in communicators.values():
        for kind, (number, nbytes) in comm.counts.items():
            before = totals.get(kind, (0, 0))
            totals[kind] = (before[0] + number, before[1] + nbytes)
    return totals


def reset_counters() -> None:
    """Reset `counters` to zero."""
    for comm in communicators.values():
        comm.counts.clear()


@explained
def gather_objects(value: Any, group: ProcessGroup | None) -> list[Any]:
    """``value`` of every rank of ``group``, pickled; only of this process if ``group`` is None. **Collective.**"""
    if group is None:
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def sum_in_order(rows: list[Tensor], into: Tensor | None = None) -> Tensor:
    """The sum of ``rows`` in the given order, in fp32 or wider: ``into`` one of the first two, or in new memory.

    For narrower dtypes always in new memory.
    """
    wide = torch.promote_types(rows[0].dtype, torch.float32)
    total = torch.add(rows[0], rows[1], out=into) if rows[0].dtype == wide else rows[0].to(wide).add_(rows[1])
    for row in rows[2:]:
        total.add_(row)
    return total
