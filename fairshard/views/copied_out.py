"""A gathered buffer in which parameters cannot compute: whole parameters are copied out of it.

Their rows lie side by side in it, or they start where a GPU would compute slowly::

    buffer   [W, S]     from the gather to the copy
    line     [N]        while gathered: the leaves are views of it; each starts at an aligned address
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from fairshard.params.gathered import Gather, Gathered
from fairshard.params.line import FlatLine
from fairshard.utils.autograd import NO_BACKWARD, current_task
from fairshard.utils.collectives import Communicator
from fairshard.utils.layout import joined_columns
from fairshard.utils.span import cut
from fairshard.utils.storage import free_storage_
from fairshard.utils.streams import Event, Stream, now
from fairshard.utils.transfers import Transfer

_ALIGNMENT = 64
"""Bytes. Kernels compute other bits at an address that is not aligned like that of a tensor of its own, and slower."""

_WIDEST = 16
"""Bytes: no dtype is wider."""

_NEEDED, _LEAST_NUMEL = 16, 1 << 16
"""Bytes, and elements: a product of large 16-bit matrices takes 3 to 8 times as long on an H200 if one of them begins
at an address that is no multiple of 16 (docs/notes/hardware.md); one copy takes less."""


def is_to_align(shapes: Sequence[torch.Size], starts: Sequence[int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a GPU would compute slowly with a parameter of ``shapes`` at its start on a line."""
    if device.type == "cpu" or dtype.itemsize > 2:
        return False
    pairs = zip(shapes, starts, strict=True)
    return any(s.numel() >= _LEAST_NUMEL and len(s) > 1 and start * dtype.itemsize % _NEEDED for s, start in pairs)


def aligned_starts(sizes: Iterable[int], unit: int) -> list[int]:
    """Where parts of ``sizes`` start that lie side by side, each at a multiple of ``unit``; then their end."""
    return list(accumulate((cut(size, unit) * unit for size in sizes), initial=0))


Kinds = Sequence[tuple[int, torch.dtype]]
"""Numbers of elements of rows that lie side by side in a row of bytes, and their dtypes."""


def row_nbytes(kinds: Kinds) -> int:
    """The size of a row of rows of ``kinds``."""
    return aligned_starts((numel * dtype.itemsize for numel, dtype in kinds), _WIDEST)[-1]


def byte_columns(buffer: Tensor, kinds: Kinds) -> list[Tensor]:
    """The columns ``[W, numel]`` of each kind in ``buffer``, ``[W, row_nbytes(kinds)]`` of uint8."""
    sizes = [numel * dtype.itemsize for numel, dtype in kinds]
    places = zip(aligned_starts(sizes, _WIDEST), sizes, kinds, strict=False)
    return [buffer[:, start : start + size].view(dtype) for start, size, (_, dtype) in places]


def aligned_params(shapes: Sequence[torch.Size], like: Tensor, world_size: int) -> tuple[Tensor, list[Tensor]]:
    """A new line with the dtype and device of ``like``, and aligned parameters of ``shapes`` as views of it.

    Padded, so that `KeptPart` can cut it into ``world_size`` equal parts.
    """
    unit = _ALIGNMENT // like.itemsize
    starts = aligned_starts((shape.numel() for shape in shapes), unit)
    line = like.new_empty(cut(starts.pop(), world_size) * world_size)
    pairs = zip(shapes, starts, strict=True)
    return line, [line[start : start + shape.numel()].view(shape) for shape, start in pairs]


@dataclass(frozen=True)
class Beside:
    """A ``line`` beside a buffer, the parameters in it, and the copies from ``sources`` to ``targets`` that fill it."""

    line: Tensor
    params: list[Tensor]
    sources: list[Tensor]
    targets: list[Tensor]


class CopyOuts:
    """The stream on which a model's parameters are copied out of buffers, so that the next gather starts meanwhile.

    In a forward a buffer is kept until the next gather has started, or its unit computes: freed earlier, that gather
    would wait for the copy. In a backward, when memory is at its peak and sums use the link meanwhile, it is freed at
    once.

    ``gathers``: the stream of the gathers, which uses the memory of buffers next.
    """

    def __init__(self, device: torch.device, gathers: Stream) -> None:
        self.stream, self._gathers = Stream(device, priority=-1), gathers
        self._kept: tuple[torch.UntypedStorage, Event] | None = None

    def keep(self, storage: torch.UntypedStorage, copied: Event) -> None:
        """Keep the memory of a buffer that the stream reads until ``copied``, or free it."""
        self._kept = storage, copied
        if current_task() != NO_BACKWARD:
            self.free()

    def free(self) -> None:
        """Free the memory that is kept, if any."""
        if self._kept is not None:
            (storage, copied), self._kept = self._kept, None
            with self._gathers.use():
                copied.wait()
            storage.resize_(0)

    def free_if(self, storage: torch.UntypedStorage) -> None:
        """Free ``storage`` if it is kept."""
        if self._kept is not None and self._kept[0]._cdata == storage._cdata:
            self.free()


class CopiedOut(Gathered):
    """A buffer, this rank's ``row`` of it, and the line to which parameters are copied.

    ``together``: all that one gather fills, in order, to which this one is added; their buffers are columns of one.
    ``copies``: copies on a stream of its own; None on CPU.
    """

    copies: CopyOuts | None = None
    _gathering: Transfer | None = None  # the last gather into the buffer; copied out of it once waited for

    def __init__(
        self, gather: Gather, buffer: Tensor, row: Tensor, beside: Beside, together: list[CopiedOut] | None = None
    ) -> None:
        super().__init__(gather, buffer, row, beside.params)
        self.kept_line, self._sources, self._targets = beside.line, beside.sources, beside.targets
        self._own_storage, self._line_nbytes = beside.line.untyped_storage(), beside.line.nbytes
        self.line_id = self._own_storage._cdata
        columns = None if buffer.is_cpu else joined_columns(beside.sources)
        is_filled = columns is not None and (columns.shape, columns.dtype) == (buffer.shape, buffer.dtype)
        has_shapes = all(a.shape == b.shape for a, b in zip(beside.sources, beside.targets, strict=True))
        # Each parameter fills its columns: one kernel copies all.
        self._widths = [source.size(1) for source in beside.sources] if is_filled and has_shapes else None
        self._together: list[CopiedOut] = [] if together is None else together
        self._together.append(self)
        free_storage_(self.kept_line)

    @staticmethod
    def copy_beside_gathers(memory: Sequence[Gathered], device: torch.device, gathers: Stream) -> None:
        """See `Gathered.copy_beside_gathers`."""
        copies = CopyOuts(device, gathers)
        for each in memory:
            if isinstance(each, CopiedOut):
                each.copies = copies

    def start(self, own: Tensor | None, tag: int) -> None:
        """Start gathering into the buffer. **Collective.**"""
        copies = self.copies
        if copies is not None:
            copies.free_if(self._storage)
        super().start(own, tag)
        self._gathering = self.transfer
        if copies is not None and self is self._together[-1]:
            copies.free()
            stream, gathers = copies.stream, now(self.buffer.device)
            with stream.use():
                stream.wait(gathers)  # which have waited for the memory freed last: the line's comes from it
                for each in self._together:
                    each._copy_out()
                    each.transfer = Transfer((stream.record(),), self.kept_line)
            copies.keep(self._storage, stream.record())

    def wait(self) -> None:
        """Wait for the running gather, if any, and copy the parameters out."""
        if self.transfer is not None and self.transfer is self._gathering:
            self._copy_out()
        super().wait()
        if self.copies is not None:
            self.copies.free_if(self._storage)

    def free(self) -> None:
        """Wait for the running gather, if any, and free all memory."""
        super().free()
        self._own_storage.resize_(0)

    def _copy_out(self) -> None:
        assert self.transfer is not None
        transfer, self.transfer = self.transfer, None
        transfer.wait()
        self._own_storage.resize_(self._line_nbytes)
        if self._widths is not None:
            torch.split_with_sizes_copy(self.buffer, self._widths, dim=1, out=self._targets)
        elif self._targets:
            # Autograd tracks neither the line nor the buffer: this makes no graph, even if grad is enabled.
            torch._foreach_copy_(self._targets, self._sources)
        if self.buffer.is_cpu and self is self._together[-1]:
            self._storage.resize_(0)


class AlignedLine(FlatLine):
    """See `FlatLine`. On a GPU, parameters are copied out of the gathered buffer if that is faster."""

    def gathered_in(self, buffer: Tensor, comm: Communicator) -> Gathered:
        """Memory of the whole parameters, gathered into ``buffer`` ``[W, S]``, or copied out of it to be aligned."""
        if not is_to_align(self.shapes, self.layout.offsets, buffer.dtype, buffer.device):
            return super().gathered_in(buffer, comm)
        line, params = aligned_params(self.shapes, buffer, comm.world_size)
        beside = Beside(line, params, self.params_of(buffer), params)
        return CopiedOut(self.gather_of(buffer, comm), buffer, self.row_of(buffer), beside)
