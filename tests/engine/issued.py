"""The collectives that this rank has issued, in order, and whether all ranks have issued the same."""

import contextlib
from dataclasses import dataclass, field
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from fairshard.utils import groups
from fairshard.utils.collectives import Communicator, RowGather
from fairshard.utils.unequal_rows import UnequalGather
from fairshard.views import ragged


class Issued(NamedTuple):
    """One collective: its ``kind``, the number of the flat param or bucket that it sends, its size, and its ranks."""

    kind: str
    source: int
    nbytes: int
    ranks: tuple


@dataclass
class Issues:
    """All collectives since this object was created, agreement exchanges included."""

    calls: list = field(default_factory=list)

    def assert_same_on_all_ranks(self, what=""):
        """Any two ranks have issued the collectives they share in the same order. **Collective.**"""
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.calls)
        own_rank, own = dist.get_rank(), self.calls
        for rank, other in enumerate(everyone):
            mine = [call for call in own if rank in call.ranks]
            theirs = [call for call in other if own_rank in call.ranks]
            for place, pair in enumerate(zip(mine, theirs)):  # noqa: B905 (lengths are compared below)
                assert pair[0] == pair[1], f"{what}: number {place} of ranks {own_rank} and {rank} differ"
            assert len(mine) == len(theirs), f"{what}: rank {rank} issued {len(theirs)}, rank {own_rank} {len(mine)}"


@contextlib.contextmanager
def recording():
    """Record every collective issued in this context."""
    issues = Issues()
    start, scatter = RowGather.start, Communicator.reduce_scatter
    total, combine = Communicator.sum_over_ranks, Communicator.all_reduce
    start_unequal, reduce_rows = UnequalGather.start, ragged.reduce_rows

    def note(kind, comm, tag, tensor):
        if comm.world_size > 1:
            ranks = tuple(dist.get_process_group_ranks(comm.group))
            issues.calls.append(Issued(kind, tag >> 16 & 0x3FFF, tensor.nbytes, ranks))

    def noted_start(gather, tag):
        note(gather._kind, gather.comm, tag, gather.buffer)
        return start(gather, tag)

    def noted_scatter(comm, bucket, tag):
        note("reduce_scatter", comm, tag, bucket)
        return scatter(comm, bucket, tag)

    def noted_total(comm, tensor, tag):
        note("sum_over_ranks", comm, tag, tensor)
        return total(comm, tensor, tag)

    def noted_combine(comm, tensor, *args):
        note("all_reduce", comm, 0, tensor)
        return combine(comm, tensor, *args)

    def noted_unequal(gather, tag):
        note("all_gather", gather._comm, tag, torch.cat(gather._rows))
        return start_unequal(gather, tag)

    def noted_rows(comm, line, rows, tag):
        note("reduce_scatter", comm, tag, line)
        return reduce_rows(comm, line, rows, tag)

    with contextlib.ExitStack() as stack:
        for owner, name, noted in (
            (UnequalGather, "start", noted_unequal),
            (ragged, "reduce_rows", noted_rows),
            (RowGather, "start", noted_start),
            (Communicator, "reduce_scatter", noted_scatter),
            (Communicator, "sum_over_ranks", noted_total),
            (Communicator, "all_reduce", noted_combine),
        ):
            stack.enter_context(mock.patch.object(owner, name, noted))
        yield issues


def without_exchange():
    """Groups created in this context use gloo's own collectives, which have no tags to hide a wrong order."""
    return mock.patch.object(groups, "EXCHANGE_RANKS", range(0))
