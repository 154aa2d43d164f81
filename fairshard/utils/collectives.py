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
reduce-scatter copy more and take two to five times as long (``benchmarks/collectives.py``). It has its own
process group. Local sums add in rank order, in fp32 for narrower dtypes, so that they do not depend on timing.
"""

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
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
from fairshard.utils.transfers import Chain, Message, Transfer, Works

__all__ = ["counters", "reset_counters"]

# Four ranks on two cores: below this many bytes gloo's own all-gather is faster (docs/notes/history.md).
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
        peers: for each step of an exchange, the rank that this one receives from, and the one that it sends to; none
            if no data moves, because the rank is alone or the group is fake.
        engines: what runs models whose first group this is, by the rest of what they run on.
        unfinished: works of dropped models, kept as long as the group; see `Works`.
        host_group: the same ranks, for tensors in host memory, if their backend has none; see `groups.on_host`.
    """

    def __init__(self, group: ProcessGroup, backend: str | None, exchange: ProcessGroup | None = None) -> None:
        self._group = weakref.ref(group)  # registries are keyed by it: a strong reference would keep both forever
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.backend = backend
        self.exchange = exchange
        steps = range(1, self.world_size if backend != "fake" else 1)
        self.peers = [((self.rank - by) % self.world_size, (self.rank + by) % self.world_size) for by in steps]
        self.engines: dict[tuple[Any, ...], Any] = {}
        self.unfinished: list[Any] = []
        self.counts: dict[str, tuple[int, int]] = {}
        self.host_group: ProcessGroup | None = None
        self._ids, self._message_numbers = itertools.count(1), itertools.count(1)

    @property
    def group(self) -> ProcessGroup:
        """The process group; users of a communicator keep its group alive."""
        group = self._group()
        if group is None:
            raise FairshardError("The process group of a model was destroyed while the model was in use.")
        return group

    @property
    def host(self) -> "Communicator":
        """The same ranks, for tensors in host memory: itself, unless there is a `host_group`."""
        return self if self.host_group is None else communicators[self.host_group]

    def gather_objects(self, value: Any) -> list[Any]:
        """``value`` of every rank, pickled. **Collective**; for error messages, never on the fast path."""
        return gather_objects(value, self.group)

    def gather_messages(self, rows: Tensor) -> Transfer:
        """Gather ``rows``; see `RowGather`. Counted separately; only one at a time. **Collective.**"""
        return RowGather(self, rows, "agreement").start(exchange_tag("all_gather", 0, next(self._message_numbers)))

    def new_id(self) -> int:
        """A number for one flat param, equal on all ranks if they build their models in the same order."""
        return next(self._ids)

    @explained
    def reduce_scatter(self, bucket: Tensor, tag: int) -> Transfer:
        """The sum over ranks of row ``rank`` of ``bucket`` ``[world_size, width]``: ``[width]``, in memory of its own.

        **Collective.** For fp16 and bf16 the sum is fp32 (except for bf16 on backends that sum themselves).
        The caller keeps ``bucket`` until it has been waited for. ``tag``: see `RowGather.start`.
        """
        self.count("reduce_scatter", bucket.nbytes - bucket.nbytes // self.world_size)
        if self.world_size == 1:
            return Transfer(result=bucket[0])
        if self.backend != "gloo" or not bucket.is_cpu:
            reduced, power = bucket.new_empty(bucket.size(1)), self.divide_fp16(bucket)
            return undivided(getattr(self.group, SCATTER)(reduced, bucket.view(-1)), reduced, power)
        if self.exchange is not None:
            return self.exchange_rows(self.exchange, bucket.unbind(), tag)
        return self._sum_received(bucket)

    @explained
    def sum_over_ranks(self, tensor: Tensor, tag: int) -> Transfer:
        """The sum over ranks of ``tensor`` ``[width]``, in rank order, like that of `reduce_scatter`. **Collective.**

        The caller keeps ``tensor`` until it has been waited for; on backends that sum themselves ``tensor`` may hold
        the result. ``tag``: see `RowGather.start`.
        """
        self.count("all_reduce", tensor.nbytes)
        if self.world_size == 1:
            return Transfer(result=tensor)
        if self.backend != "gloo" or not tensor.is_cpu:
            power = self.divide_fp16(tensor)
            return undivided(dist.all_reduce(tensor, group=self.group, async_op=True), tensor, power)
        if self.exchange is not None:
            return self.exchange_rows(self.exchange, [tensor] * self.world_size, tag)
        sent = tensor.new_zeros(self.world_size, -(-tensor.numel() // self.world_size))
        sent.view(-1)[: tensor.numel()] = tensor

        def gather(part: Tensor) -> Transfer:
            line = part.new_empty(sent.numel())  # `sent` must live until then
            return Transfer((getattr(self.group, GATHER)(line, part),), line[: tensor.numel()])

        return Chain(self._sum_received(sent), gather)

    @explained
    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max", "min"] = "sum") -> Transfer:
        """Combine ``tensor`` over all ranks, in place. **Collective.**"""
        self.count("all_reduce", tensor.nbytes)
        if self.world_size == 1:
            return Transfer(result=tensor)
        work = dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op.upper()), group=self.group, async_op=True)
        return Transfer((work,), tensor)

    def divide_fp16(self, tensor: Tensor) -> float:
        """Divide an fp16 ``tensor`` by a power of two, which is exact, to avoid overflow of sums; returns the power."""
        power = 2.0 ** math.ceil(math.log2(self.world_size)) if tensor.dtype == torch.float16 else 1.0
        if power > 1:
            tensor.div_(power)
        return power

    def exchange_rows(self, exchange: ProcessGroup, rows: Sequence[Tensor], tag: int) -> Transfer:
        """Send ``rows[i]`` directly to rank ``i``; the sum of what this rank gets, in rank order. **Collective.**"""
        own = rows[self.rank]
        received = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.world_size)]
        works = Works(exchange, self.messages(rows, received), tag, self.unfinished)
        return Transfer(works, finish=lambda: sum_in_order(received, into=received[self.rank == 0]))

    def messages(self, sent: Sequence[Tensor], received: Sequence[Tensor], number: int = 0) -> list[Message]:
        """Those that send ``sent[i]`` to rank ``i`` and fill ``received[i]`` from it; empty tensors take none.

        ``number`` distinguishes messages of one tag from others of it.
        """
        messages: list[Message] = []
        for source, target in self.peers:
            if received[source].numel():
                messages.append(("recv", [received[source]], source, number))
            if sent[target].numel():
                messages.append(("send", [sent[target]], target, number))
        return messages

    def _sum_received(self, rows: Tensor) -> Transfer:
        """Like `exchange_rows`, by the backend's all-to-all."""
        received = torch.empty_like(rows)
        works = [dist.all_to_all_single(received.view(-1), rows.view(-1), group=self.group, async_op=True)]
        return Transfer(works, finish=lambda: sum_in_order(list(received)))

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

    __slots__ = ("_exchange", "_kind", "_line", "_messages", "_native", "_nbytes", "_own", "buffer", "comm")

    def __init__(self, comm: Communicator, buffer: Tensor, kind: Kind = "all_gather") -> None:
        self.comm, self.buffer = comm, buffer
        self._kind: Kind = kind
        self._line, self._own = buffer.view(-1), buffer[comm.rank]
        self._nbytes = buffer.nbytes - buffer.nbytes // comm.world_size
        self._native = getattr(comm.group, GATHER)
        is_small = comm.world_size == 4 and buffer.nbytes < _EXCHANGE_MIN_BYTES_AT_FOUR
        self._exchange = comm.exchange if buffer.is_cpu and not is_small else None
        self._messages = comm.messages([self._own] * comm.world_size, buffer.unbind()) if self._exchange else []

    def through(self, user: UserGather | None) -> "RowGather":
        """This gather, or that of ``user``, which replaces it."""
        return self if user is None else user(self)

    @explained
    def start(self, tag: int) -> Transfer:
        """Fill the buffer; this rank's row is already written. **Collective.**

        ``tag`` identifies the exchange: equal on all ranks, and different from that of every other running exchange.
        """
        comm = self.comm
        if comm.world_size == 1:  # nothing is sent, but this stream may have just written the row
            return Transfer((now(self.buffer.device),), self.buffer)
        comm.count(self._kind, self._nbytes)
        if self._exchange is None:
            return Transfer((self._native(self._line, self._own),), self.buffer)
        return Transfer(Works(self._exchange, self._messages, tag, comm.unfinished), self.buffer)


communicators: "weakref.WeakKeyDictionary[ProcessGroup, Communicator]" = weakref.WeakKeyDictionary()
"""The only `Communicator` of each group; see `groups.communicator`."""


def counters() -> dict[str, tuple[int, int]]:
    """Collectives of this process since the last `reset_counters`: ``{kind: (number, bytes)}``.

    Bytes are those received by an all-gather, those sent by a reduce-scatter or an all-to-all, and the size of the
    tensor for an all-reduce. A direct exchange counts once. Groups of one rank are not counted.
    """
    totals: dict[str, tuple[int, int]] = {}
    for kind, (number, nbytes) in [item for comm in communicators.values() for item in comm.counts.items()]:
        before = totals.get(kind, (0, 0))
        totals[kind] = before[0] + number, before[1] + nbytes
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


def undivided(work: Any, result: Tensor, power: float) -> Transfer:
    """Wait for ``work``, which makes ``result`` of what `Communicator.divide_fp16` has divided by ``power``."""
    if power == 1:
        return Transfer((work,), result)
    return Transfer((work,), finish=lambda: result.float().mul_(power))


def sum_in_order(rows: list[Tensor], into: Tensor | None = None) -> Tensor:
    """The sum of ``rows`` in the given order, in fp32 or wider: ``into`` one of the first two, or in new memory.

    For narrower dtypes always in new memory.
    """
    wide = torch.promote_types(rows[0].dtype, torch.float32)
    total = torch.add(rows[0], rows[1], out=into) if rows[0].dtype == wide else rows[0].to(wide).add_(rows[1])
    for row in rows[2:]:
        total.add_(row)
    return total
