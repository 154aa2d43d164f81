r"""Rectangles of the rows that ranks own, by which whole parameters are copied to rows and back.

A parameter that lies on a line is in few rectangles, however many rows the line is cut into::

    rows of 8    | . . . . . a a a |      a, a part of one row
                 | b b b b b b b b |      b, whole rows
                 | b b b b b b b b |
                 | c c . . . . . . |      c, a part of one row
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from fairshard.utils.span import Span


@dataclass(frozen=True)
class Block:
    """A rectangle of the rows that holds the elements ``source`` of one parameter, or of the padding."""

    rows: Span
    columns: Span
    source: Span

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        return self.rows.numel, self.columns.numel

    def by_row(self) -> list[tuple[int, Span]]:
        """Each row of the block, and which elements of the parameter are in it."""
        width, first = self.columns.numel, self.source.start
        return [(row, Span(0, width).shift(first + i * width)) for i, row in enumerate(range(*self.rows)) if width]

    def of(self, buffer: Tensor) -> Tensor:
        """The block, as a view of ``buffer`` ``[W, S]``."""
        return buffer[self.rows.start : self.rows.stop, self.columns.start : self.columns.stop]

    def like(self, flat: Tensor) -> Tensor:
        """The elements of ``flat``, the flattened parameter, that belong in the block; in the shape of the block."""
        return flat[self.source.start : self.source.stop].view(self.shape)


def rectangles(span: Span, width: int, offset: int = 0) -> list[Block]:
    """The blocks that ``span`` fills in rows of ``width`` elements, in order; at most three, whatever its length.

    ``offset``: the rows' first column. The sources of the blocks count from the first element of ``span``.
    """
    blocks = []
    start = span.start
    while start < span.stop:
        row, column = divmod(start, width)
        num_rows = 1 if column else max(1, (span.stop - start) // width)
        stop = min(span.stop, (row + num_rows) * width)
        columns = Span(column, column + (stop - start) // num_rows).shift(offset)
        blocks.append(Block(Span(row, row + num_rows), columns, Span(start, stop).shift(-span.start)))
        start = stop
    return blocks


def joined_columns(parts: Sequence[Tensor]) -> Tensor | None:
    """``parts``, 2-d views that lie side by side in the columns of one tensor, as one view; None if they do not."""
    if not parts or parts[0].dim() != 2:
        return None
    first = parts[0]
    shape, stride, start = first.shape, first.stride(), first.storage_offset()
    stop = start
    for part in parts:
        if part.dim() != 2 or part.size(0) != shape[0] or part.stride() != stride or part.storage_offset() != stop:
            return None
        stop += part.size(1)
    return first.as_strided((shape[0], stop - start), stride, start) if stride[1] == 1 else None
