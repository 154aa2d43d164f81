"""The memory that holds the whole parameters of a line while they are gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fairshard.utils.collectives import Communicator, RowGather, UserGather
from fairshard.utils.storage import alloc_storage_
from fairshard.utils.streams import Stream
from fairshard.utils.transfers import Transfer


class KeptPart:
    """This rank's share of ``buffer`` ``[W, S]`` among the ranks of ``comm``, whose number divides ``W``.

    Kept from forward to backward so that only a few ranks gather the line again. Ranks ``k * part .. k * part + k - 1``
    together keep the whole line, each ``W * S / k`` elements of it::

        W = 4, k = 2     | row 0 | row 1 | row 2 | row 3 |      the buffer
        ranks 0 and 2    | kept ---------|                      after forward
        ranks 1 and 3                    | kept ---------|

    Source: ZeRO++ (Wang et al. 2023), secondary partition.

    ``kept``: the share; None while the weights may change.
    """

    def __init__(self, buffer: Tensor, comm: Communicator) -> None:
        self._rows = buffer.view(comm.world_size, buffer.numel() // comm.world_size)
        self._comm = comm
        self.kept: Tensor | None = None

    def keep(self, keeps: bool) -> None:
        """If ``keeps``, copy this rank's share out of the buffer before the buffer is freed; otherwise drop it."""
        self.kept = self._rows[self._comm.rank].clone() if keeps else None

    def write(self) -> RowGather:
        """Write the share into the buffer, which has memory again; returns the gather of the other shares."""
        assert self.kept is not None
        self._rows[self._comm.rank].copy_(self.kept)
        return RowGather(self._comm, self._rows)


class Gather(Protocol):
    """An all-gather into one buffer, in which this rank's row is already written."""

    def through(self, user: UserGather | None) -> Gather:
        """The gather to start: that of ``user``, where it may replace this one."""

    def start(self, tag: int) -> Transfer:
        """Start the gather. **Collective.**"""


class Gathered:
    """A ``buffer`` ``[W, S]`` into which rows are gathered, this rank's ``row`` of it, and the whole parameters.

    Attributes:
        buffer: its storage is empty while the line is resharded.
        views: the whole parameters, to which the leaves point.
        transfer: a gather not waited for yet, or None.
        custom: the user's own all-gather; None: gather with the engine's own.
        kept_line: the memory of the whole parameters; a part of it can be kept between forward and backward.
        line_id: identifies the storage of `kept_line`.
    """

    def __init__(self, gather: Gather, buffer: Tensor, row: Tensor, views: Sequence[Tensor]) -> None:
        self.buffer = buffer
        # .data gives each view its own version counter. Without it autograd would see refilling the buffer between
        # forward and backward as an in-place change (tests/engine/test_leaves.py).
        self.views = [view.data for view in views]
        self.transfer: Transfer | None = None
        self.custom: UserGather | None = None
        self._gather = gather
        self._row = row
        self._storage = buffer.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self.kept_line, self.line_id = buffer, self._storage._cdata

    @staticmethod
    def copy_beside_gathers(memory: Sequence[Gathered], device: torch.device, gathers: Stream) -> None:
        """Copy parameters of ``memory``, all of one model, while others are gathered on ``gathers``; here none are."""

    def start(self, own: Tensor | None, tag: int) -> None:
        """Start gathering: this rank sends ``own``; None: what its row holds already. **Collective.**"""
        if self.transfer is not None:  # a gather not waited for yet; its weights have changed since
            self.transfer.wait()
        if not self._storage.nbytes():
            self._storage.resize_(self._nbytes)
        if own is not None:
            self._row.copy_(own, non_blocking=True)
        self.transfer = (self._gather if self.custom is None else self._gather.through(self.custom)).start(tag)

    def start_from(self, part: KeptPart, tag: int) -> None:
        """Start gathering what a few ranks have kept, directly into `kept_line`. **Collective.**"""
        self.free()
        alloc_storage_(self.kept_line)
        self.transfer = part.write().through(self.custom).start(tag)

    def wait(self) -> None:
        """Wait for the running gather, if any; then the views hold the whole parameters."""
        if self.transfer is not None:
            transfer, self.transfer = self.transfer, None
            transfer.wait()

    def free(self) -> None:
        """Wait for the running gather, if any, and free the memory."""
        if self.transfer is not None:
            Gathered.wait(self)
        self._storage.resize_(0)
