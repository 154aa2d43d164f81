"""An all-gather of rows and, in messages of their own, of tensors that are received where they are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fairshard.utils.collectives import Communicator, RowGather
from fairshard.utils.transfers import Transfer, wait_all

MAX_PARTS = 255
"""Most parts of one gather: their numbers take 8 bits of the tag."""


class PartGather(RowGather):
    """Gathers ``rows`` ``[W, n]``, and each of ``parts``: one tensor per rank, which that rank fills and sends.

    The tensors of a part may differ in size, and be empty. Needs the direct exchange of ``comm``; counts as one gather.
    """

    __slots__ = ("_parts",)

    def __init__(self, comm: Communicator, rows: Tensor, parts: Sequence[Sequence[Tensor]]) -> None:
        super().__init__(comm, rows)
        own, exchange = comm.rank, comm.exchange
        assert exchange is not None
        assert len(parts) <= MAX_PARTS
        self._nbytes += sum(each.nbytes for part in parts for rank, each in enumerate(part) if rank != own)
        self._parts: list[tuple[Callable[..., Any], list[Tensor], int, int]] = []
        for source, target in comm.peers:
            for number, part in enumerate(parts, 1):
                if part[source].numel():
                    self._parts.append((exchange.recv, [part[source]], source, number << 8))
                if part[own].numel():
                    self._parts.append((exchange.send, [part[own]], target, number << 8))

    def start(self, tag: int) -> Transfer:
        """Gather; this rank's row and parts are already written. See `RowGather.start`."""
        works: list[Any] = []
        if self.buffer.numel():
            works += super().start(tag).works
        else:
            self.comm.count("all_gather", self._nbytes)
        try:
            for message, tensors, peer, number in self._parts:
                works.append(message(tensors, peer, tag | number))
        except Exception as error:
            wait_all(works, error)
        return Transfer(works, self.buffer)
