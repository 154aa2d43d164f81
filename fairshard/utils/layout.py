r"""Position of each parameter on a line, and the parts that each rank owns.

The parameters of one flat param are laid end to end and padded to ``world_size * shard_numel`` elements. Rank
``r`` owns row ``r`` of the line seen as ``[world_size, shard_numel]``::

    line      | weight ------------------- | bias - | pad |        numel = 21, padded to 24
    rows      |   rank 0   |   rank 1   |   rank 2   |             3 ranks, shard_numel = 8
    bucket    row 0: weight[0:8]                                   a row may carry the shards of
              row 1: weight[8:16]                                  several flat params side by side,
              row 2: weight[16:18] bias[0:3] pad                   each in its own columns

A parameter is in few rectangles of the rows, by which it is copied to them and back, however many rows there are::

    rows of 8    | . . . . . a a a |      a, a part of one row
                 | b b b b b b b b |      b, whole rows
                 | b b b b b b b b |
                 | c c . . . . . . |      c, a part of one row

All arithmetic is on integers: shards, buckets and state dicts use it, and tests need no process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torch import Tensor

from fairshard.utils.span import Span, cut


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
        return [(row, Span(0, width).shift(first + i * width)) for i, row in enumerate(range(*self.rows))]

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


@dataclass(frozen=True)
class Piece:
    """A run of elements in the overlap of one parameter and one row.

    ``source`` counts from the parameter's first element, ``target`` from the row's first column; both have the
    same length.
    """

    index: int
    row: int
    source: Span
    target: Span


class FlatLayout:
    """Parameters of given sizes on a line that is sharded over ``world_size`` ranks: laid end to end.

    Attributes:
        offsets: where each parameter starts on the line.
        places: where each starts in the rows ``[W, S]``, laid end to end: here, as on the line.
    """

    def __init__(self, numels: Sequence[int], world_size: int) -> None:
        self._lay(numels, world_size, cut(sum(numels), world_size), list(accumulate(numels, initial=0))[:-1])

    def _lay(self, numels: Sequence[int], world_size: int, shard_numel: int, places: Sequence[int]) -> None:
        self.numels, self.world_size, self.shard_numel = tuple(numels), world_size, shard_numel
        self.numel = sum(numels)
        self.padded_numel = shard_numel * world_size
        self.offsets = self.places = tuple(places)

    def param_span(self, index: int) -> Span:
        """Span of parameter ``index`` on the line."""
        return Span(0, self.numels[index]).shift(self.offsets[index])

    def filled(self, rank: int) -> int:
        """Number of leading elements of row ``rank`` that belong to parameters; the rest is padding."""
        return max(0, min(self.shard_numel, self.numel - rank * self.shard_numel))

    def counted(self, rank: int) -> list[Span]:
        """Spans of row ``rank`` to count in sums over ranks, so that each element of a parameter counts once."""
        return [Span(0, self.filled(rank))]

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Every (parameter, row) overlap, parameter by parameter."""
        return tuple(
            Piece(index, row, span, block.columns)
            for index, own in enumerate(self.blocks)
            for block in own
            for row, span in block.by_row()
        )

    @cached_property
    def blocks(self) -> tuple[Sequence[Block], ...]:
        """For each parameter the blocks that hold it."""
        pairs = zip(self.places, self.numels, strict=True)
        return tuple(rectangles(Span(place, place + numel), self.shard_numel) for place, numel in pairs)

    @cached_property
    def gaps(self) -> tuple[Span, ...]:
        """The parts of the rows ``[W, S]``, laid end to end, that parameters leave empty, in order."""
        return (Span(self.numel, self.padded_numel),)

    @cached_property
    def empty_blocks(self) -> list[Block]:
        """The blocks of the padding; they are zero in every transfer."""
        return [block for gap in self.gaps for block in rectangles(gap, self.shard_numel)]

    def describe(self, index: int) -> str:
        """Where parameter ``index`` lies, in words, if its size alone does not say that; equal on all ranks."""
        return ""

    def pieces_of(self, rank: int) -> list[Piece]:
        """The pieces that rank ``rank`` owns, parameter by parameter."""
        return [piece for piece in self.pieces if piece.row == rank]


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
