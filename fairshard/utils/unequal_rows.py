"""Gathers and reductions of rows of unequal width, some of them empty, that lie one after the other on a line.

===================  ==========================================  ==============================================
backend, ranks       gather                                      reduction (always a *sum*)
===================  ==========================================  ==============================================
gloo, CPU, 2 to 4    direct exchange of rows                     direct exchange, local sum in rank order
gloo, CPU, more      a broadcast by each rank                    all_to_all_single, local sum in rank order
gloo, a device       a broadcast by each rank                    all_reduce of the line
NCCL and others      all_gather of a list                        reduce_scatter of a list
===================  ==========================================  ==============================================

Nothing is padded, and an empty row takes no message of a direct exchange or broadcast. NCCL makes of a list of unequal
rows one group of broadcasts, or of reductions, each by or to one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fairshard.utils.collectives import GATHER, SCATTER, Communicator, UserGather, sum_in_order, undivided
from fairshard.utils.failures import explained
from fairshard.utils.groups import backend_name
from fairshard.utils.transfers import Transfer, Works, wait_all


class UnequalGather:
    """An all-gather of ``rows`` of ``line``, one per rank, prepared for repeated use; each rank fills its own."""

    def __init__(self, comm: Communicator, line: Tensor, rows: Sequence[Tensor]) -> None:
        own = comm.rank
        self._comm, self._rows, self._own = comm, list(rows), rows[own]
        self._line = line if _are_even(rows) else None
        self._nbytes = sum(row.nbytes for rank, row in enumerate(rows) if rank != own)
        self._is_gloo = _is_gloo(comm, rows[own])
        self._exchange = comm.exchange if rows[own].is_cpu else None
        self._messages = comm.messages([rows[own]] * comm.world_size, rows)

    def through(self, user: UserGather | None) -> UnequalGather:
        """Itself: a user's gather has rows of one width."""
        return self

    @explained
    def start(self, tag: int) -> Transfer:
        """Gather; this rank's row is already written. See `RowGather.start`."""
        comm, own = self._comm, self._own
        comm.count("all_gather", self._nbytes)
        if self._exchange is not None:
            return Transfer(Works(self._exchange, self._messages, tag, comm.unfinished))
        if not self._is_gloo:
            if self._line is not None:
                return Transfer((getattr(comm.group, GATHER)(self._line, own),))
            return Transfer((dist.all_gather(self._rows, own, group=comm.group, async_op=True),))
        works: list[Any] = []
        try:
            for rank, row in enumerate(self._rows):
                if row.numel():
                    works.append(dist.broadcast(row, group=comm.group, group_src=rank, async_op=True))
        except Exception as error:
            wait_all(works, error)
        return Transfer(works)


@explained
def reduce_rows(comm: Communicator, line: Tensor, rows: Sequence[Tensor], tag: int) -> Transfer:
    """The sum over ranks of ``rows[rank]``, new memory; ``rows`` follow each other on ``line``. **Collective.**

    See `Communicator.reduce_scatter`.
    """
    own = rows[comm.rank]
    comm.count("reduce_scatter", line.nbytes - own.nbytes)
    if not _is_gloo(comm, line):
        return _reduce_natively(comm, line, rows)
    if not line.is_cpu:
        work = dist.all_reduce(line, group=comm.group, async_op=True)
        return Transfer((work,), finish=own.clone)
    if comm.exchange is None:
        received = line.new_empty(comm.world_size, own.numel())
        sizes = [row.numel() for row in rows]
        into, of = received.view(-1), [own.numel()] * comm.world_size
        works = [dist.all_to_all_single(into, line, of, sizes, group=comm.group, async_op=True)]
        return Transfer(works, finish=lambda: sum_in_order(list(received)))
    return comm.exchange_rows(comm.exchange, rows, tag)


def _are_even(rows: Sequence[Tensor]) -> bool:
    """Whether all have as many elements; then backends need no list of them, from and to which some copy."""
    return len({row.numel() for row in rows}) == 1


def _is_gloo(comm: Communicator, tensor: Tensor) -> bool:
    """Whether gloo sends ``tensor``."""
    return comm.backend == "gloo" and (tensor.is_cpu or backend_name(comm.group, tensor.device) == "gloo")


def _reduce_natively(comm: Communicator, line: Tensor, rows: Sequence[Tensor]) -> Transfer:
    """The backend's own reduce-scatter; divides fp16 first."""
    reduced = torch.empty_like(rows[comm.rank])
    power = comm.divide_fp16(line)
    if _are_even(rows):
        work = getattr(comm.group, SCATTER)(reduced, line)
    else:
        work = dist.reduce_scatter(reduced, list(rows), group=comm.group, async_op=True)
    return undivided(work, reduced, power)
