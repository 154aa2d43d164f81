"""The memory in which the parameters of a line are whole while they are gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from fairshard.params.kept_part import KeptPart
from fairshard.utils.collectives import RowGather, Transfer
from fairshard.utils.custom_comms import AllGather, CustomGather


class Gather(Protocol):
    """An all-gather into one buffer, of which this rank's row is written."""

    def start(self, tag: int) -> Transfer:
        """Start it. **Collective.**"""
        ...


class Gathered:
    """A ``buffer`` ``[W, S]`` that rows are gathered into, and the whole parameters in it.

    Attributes:
        buffer: its storage is empty while the line is resharded.
        views: the whole parameters, which leaves show.
        transfer: the gather that nothing has waited for yet.
        custom: the user's own all-gather, if there is one.
        line_id: of the storage of `kept_line`.
    """

    def __init__(self, gather: Gather, buffer: Tensor, rank: int, views: Sequence[Tensor]) -> None:
        self.buffer = buffer
        # .data gives each view a version counter of its own: refilling the buffer between forward and backward is
        # then no in-place edit to autograd (tests/engine/test_leaves.py).
        self.views = [view.data for view in views]
        self.transfer: Transfer | None = None
        self.custom: AllGather | None = None
        self._gather = gather
        self._row = buffer[rank]
        self._storage = buffer.untyped_storage()
        self._nbytes = buffer.nbytes
        self.line_id = self._storage._cdata

    @property
    def kept_line(self) -> Tensor:
        """The memory of the whole parameters, of which a part can be kept between forward and backward."""
        return self.buffer

    def start(self, own: Tensor | None, part: KeptPart | None, tag: int) -> None:
        """Start gathering: this rank's row is ``own``, or the rows come from a ``part`` of them. **Collective.**"""
        if self.transfer is not None:  # a gather not waited for yet; its weights have changed since
            self.transfer.wait()
        if not self._storage.nbytes():
            self._storage.resize_(self._nbytes)
        if own is not None:
            self._row.copy_(own, non_blocking=True)
        plain = part is None and self.custom is None
        self.transfer = (self._gather if plain else self._gather_from(part)).start(tag)

    def wait(self) -> None:
        """Wait for the gather under way, if any: the views are whole."""
        if self.transfer is not None:
            transfer, self.transfer = self.transfer, None
            transfer.wait()

    def free(self) -> None:
        """Give the memory back, once no gather writes to it any more."""
        if self.transfer is not None:
            transfer, self.transfer = self.transfer, None
            transfer.wait()
        self._storage.resize_(0)

    def gather_by(self, custom: AllGather | None) -> None:
        """Gather by the user's own all-gather from now on; None: by ours."""
        self.custom = custom

    def _gather_from(self, part: KeptPart | None) -> Gather:
        """Return what fills the memory, in which this rank's row is written; with a ``part``, after writing that."""
        gather: Gather = self._gather if part is None else part.write()
        if self.custom is not None and isinstance(gather, RowGather):
            return CustomGather(gather, self.custom)
        return gather
