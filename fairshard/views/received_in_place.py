"""Rows of which large parameters are received where they compute; only small ones are copied out.

For direct exchanges, where more messages cost less than to copy large parameters::

    line      [numel]    while gathered: the leaves are views of it; rows of large parameters are sent from it
    staging   [W, s]     from the gather to the copy: the rows of the small parameters, side by side
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fairshard.params.gathered import Gather
from fairshard.utils.collectives import Communicator, RowGather
from fairshard.utils.placed_layout import RowsLayout
from fairshard.utils.storage import free_storage_
from fairshard.views.copied_out import Beside, CopiedOut

MAX_PARTS = 255
"""Most parts of one gather: their numbers take 8 bits of the tag."""

_MIN_NBYTES = 1 << 17
"""Least bytes that a rank sends of a parameter that is received in place (docs/notes/history.md, Collectives)."""


def large_params(layout: RowsLayout, itemsize: int) -> list[int]:
    """The parameters that are received in place: those that are cut, of at least `_MIN_NBYTES` for each rank."""
    sizes = enumerate(zip(layout.sizes, layout.numels, strict=True))
    least = _MIN_NBYTES * layout.world_size
    large = [index for index, ((rows, _), numel) in sizes if rows is not None and numel * itemsize >= least]
    return large[:MAX_PARTS]


class PartGather(RowGather):
    """Gathers ``rows`` ``[W, n]``, and each of ``parts``: one tensor per rank, which that rank fills and sends.

    The tensors of a part may differ in size, and be empty. Needs the direct exchange of ``comm``; counts as one gather.
    """

    __slots__ = ()

    def __init__(self, comm: Communicator, rows: Tensor, parts: Sequence[Sequence[Tensor]]) -> None:
        super().__init__(comm, rows)
        own, self._messages = comm.rank, []
        self._nbytes += sum(each.nbytes for part in parts for rank, each in enumerate(part) if rank != own)
        self._exchange = comm.exchange
        for number, part in enumerate((rows.unbind(), *parts)):
            self._messages += comm.messages([part[own]] * comm.world_size, part, number << 8)


class ReceivedInPlace(CopiedOut):
    """Memory of the whole parameters, filled by ``staged``, a gather of staging rows and of large parameters in place.

    ``small``: the copies out of the staging rows. ``places``: where this rank's rows of each parameter are sent from,
    each with its first element in the shard. A gather of the user's own uses the buffer as `CopiedOut` does.
    """

    def __init__(
        self,
        gather: Gather,
        buffer: Tensor,
        beside: Beside,
        staged: PartGather,
        small: Beside,
        places: Sequence[tuple[int, Tensor]],
    ) -> None:
        super().__init__(gather, buffer, buffer[staged.comm.rank], beside)
        self._staged, self._small = staged, small
        self._places = [place for _, place in places]
        self._own_spans = [slice(start, start + place.numel()) for start, place in places]
        self._staging, self._staging_nbytes = staged.buffer.untyped_storage(), staged.buffer.nbytes
        self._is_in_place = False
        free_storage_(staged.buffer)

    def start(self, own: Tensor | None, tag: int) -> None:
        """Start gathering, large parameters directly into the line. **Collective.**"""
        self._is_in_place = self.custom is None
        if not self._is_in_place:
            super().start(own, tag)
            return
        assert own is not None
        if self.transfer is not None:  # a gather not waited for yet; its weights have changed since
            self.transfer.wait()
        self._own_storage.resize_(self._line_nbytes)
        self._staging.resize_(self._staging_nbytes)
        if self._places:  # this rank may have no rows of any parameter
            torch._foreach_copy_(self._places, [own[span] for span in self._own_spans])
        self.transfer = self._gathering = self._staged.start(tag)

    def free(self) -> None:
        """Wait for the running gather, if any, and free all memory."""
        super().free()
        self._staging.resize_(0)

    def _copy_out(self) -> None:
        if not self._is_in_place:
            super()._copy_out()
            return
        assert self.transfer is not None
        transfer, self.transfer = self.transfer, None
        transfer.wait()
        if self._small.targets:
            torch._foreach_copy_(self._small.targets, self._small.sources)
        self._staging.resize_(0)
