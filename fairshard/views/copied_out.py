"""A gathered buffer in which rows of several parameters lie side by side: whole parameters are copied out of it.

::

    buffer   [W, S]     from the gather to the copy
    line     [N]        while gathered: the leaves are views of it; each starts at an aligned address
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fairshard.params.gathered import Gather, Gathered
from fairshard.params.kept_part import KeptPart
from fairshard.utils.collectives import Ready
from fairshard.utils.custom_comms import AllGather
from fairshard.utils.storage import alloc_storage_, free_storage_
from fairshard.utils.streams import now
from fairshard.utils.tensors import joined_columns
from fairshard.views.joint_gather import JointGather


@dataclass(frozen=True)
class Beside:
    """A ``line`` beside a buffer, the parameters in it, and the copies from ``sources`` to ``targets`` that fill it."""

    line: Tensor
    params: list[Tensor]
    sources: list[Tensor]
    targets: list[Tensor]


class CopiedOut(Gathered):
    """A buffer, and the line to which parameters are copied."""

    def __init__(self, gather: Gather, buffer: Tensor, rank: int, beside: Beside) -> None:
        super().__init__(gather, buffer, buffer[rank], beside.params)
        self._line, self._sources, self._targets = beside.line, beside.sources, beside.targets
        self._own_storage, self._line_nbytes = beside.line.untyped_storage(), beside.line.nbytes
        self.line_id = self._own_storage._cdata
        columns = None if buffer.is_cpu else joined_columns(beside.sources)
        is_filled = columns is not None and (columns.shape, columns.dtype) == (buffer.shape, buffer.dtype)
        has_shapes = all(a.shape == b.shape for a, b in zip(beside.sources, beside.targets, strict=True))
        # Each parameter fills its columns: one kernel copies all.
        self._widths = [source.size(1) for source in beside.sources] if is_filled and has_shapes else None
        self._is_to_copy = False
        self._together: Sequence[CopiedOut] = [self]  # all that one gather fills, in order
        free_storage_(self._line)

    def share(self, joint: JointGather, together: Sequence[CopiedOut]) -> None:
        """Share the gather ``joint`` with all of ``together``; `buffer` is a block of columns of its buffer."""
        self._together = together
        self._storage, self._nbytes = joint.buffer.untyped_storage(), joint.buffer.nbytes

    @property
    def kept_line(self) -> Tensor:
        """The line; leaves are views of it."""
        return self._line

    def start(self, own: Tensor | None, part: KeptPart | None, tag: int) -> None:
        """Start gathering into the buffer, or, from a ``part``, directly into the line. **Collective.**"""
        if part is not None:
            alloc_storage_(self._line)
            self.transfer = self._gather_from(part).start(tag)
            self._is_to_copy = False
            return
        copies = None if self.buffer.is_cpu else self.copies
        if copies is not None:
            copies.free_if(self._storage)
        super().start(own, part, tag)
        self._is_to_copy = True
        if copies is not None and self is self._together[-1]:
            copies.free()
            stream, gathers = copies.stream, now(self.buffer.device)
            with stream.use():
                stream.wait(gathers)  # which have waited for the memory freed last: the line's comes from it
                for each in self._together:
                    if each._is_to_copy:
                        each._copy_out()
                        each.transfer = Ready(stream.record(), self._line)
            copies.keep(self._storage, stream.record())

    def wait(self) -> None:
        """Wait for the running gather, if any, and copy the parameters out."""
        if self._is_to_copy:
            self._copy_out()
        super().wait()

    def free(self) -> None:
        """Wait for the running gather, if any, and free all memory."""
        super().free()
        self._is_to_copy = False
        self._own_storage.resize_(0)

    def gather_by(self, custom: AllGather | None) -> None:
        """See `Gathered.gather_by`. In addition, passes ``custom`` to a gather that several flat params share."""
        super().gather_by(custom)
        if isinstance(self._gather, JointGather):
            self._gather.custom = custom

    def _copy_out(self) -> None:
        assert self.transfer is not None
        transfer, self.transfer, self._is_to_copy = self.transfer, None, False
        transfer.wait()
        self._own_storage.resize_(self._line_nbytes)
        if self._widths is not None:
            torch.split_with_sizes_copy(self.buffer, self._widths, dim=1, out=self._targets)
        elif self._targets:
            # Autograd tracks neither the line nor the buffer: this makes no graph, even if grad is enabled.
            torch._foreach_copy_(self._targets, self._sources)
        if self.buffer.is_cpu and self is self._together[-1]:
            self._storage.resize_(0)
