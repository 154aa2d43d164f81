r"""Layout of parameters that are sharded by rows: their columns in the gathered buffer.

A parameter of ``D`` rows (slices along the dimension that is cut) gives every rank ``ceil(D / world_size)`` rows, the
last ranks fewer or none, as DTensor's ``Shard`` does. Rank ``r``'s rows of all parameters are side by side in row ``r``
of the buffer::

    buffer [W, S]    | weight       | bias |        weight (5, 2), bias (5,), on 2 ranks: 3 rows each
    row 0            | w0 w1 w2     | b0-2 |
    row 1            | w3 w4 pad    | b3-4 |
    line             | w0 w1 w2 w3 w4 | b0-4 |      whole parameters one after the other: copied out of the buffer

A parameter without dimensions (``D`` None) is whole in every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torch import Tensor

from fairshard.utils.layout import FlatLayout, Piece
from fairshard.utils.span import Span, cut


@dataclass(frozen=True)
class Block:
    """A rectangle of the buffer: rows, and the columns of one parameter; it holds the elements ``source``."""

    rows: Span
    columns: Span
    source: Span

    @cached_property
    def _shape(self) -> tuple[int, int]:
        return self.rows.numel, self.columns.numel

    @cached_property
    def _is_repeated(self) -> bool:
        return self.source.numel != self._shape[0] * self._shape[1]

    def of(self, buffer: Tensor) -> Tensor:
        """The block, as a view of ``buffer`` ``[W, S]``."""
        return buffer[self.rows.start : self.rows.stop, self.columns.start : self.columns.stop]

    def like(self, flat: Tensor) -> Tensor:
        """The elements of ``flat``, the flattened parameter, that belong in the block; in the shape of the block."""
        run = flat[self.source.start : self.source.stop]
        return run.expand(self._shape) if self._is_repeated else run.view(self._shape)


class RowsLayout(FlatLayout):
    """Parameters, each of ``(D, elements per row)``, sharded by rows over ``world_size`` ranks.

    `param_span` is a parameter's span on the line; `pieces` and `padding` describe the buffer.
    """

    def __init__(self, sizes: Sequence[tuple[int | None, int]], world_size: int) -> None:
        super().__init__([width if rows is None else rows * width for rows, width in sizes], world_size)
        self.sizes = tuple(sizes)
        self.widths = tuple(width * (1 if rows is None else cut(rows, world_size)) for rows, width in sizes)
        self.columns = tuple(accumulate(self.widths, initial=0))[:-1]
        self.shard_numel = sum(self.widths)
        self.padded_numel = self.shard_numel * world_size

    def num_rows(self, index: int, rank: int) -> int:
        """Number of rows of parameter ``index`` on rank ``rank``."""
        rows = self.sizes[index][0]
        if rows is None:
            return 1
        chunk = cut(rows, self.world_size)
        return max(0, min(chunk, rows - rank * chunk))

    def filled(self, rank: int) -> int:
        """The whole row: padding is between parameters, and is zero."""
        return self.shard_numel

    def counted(self, rank: int) -> list[Span]:
        """The whole row; from rank 1 on, without parameters that every rank holds whole."""
        if not rank or all(rows is not None for rows, _ in self.sizes):
            return [Span(0, self.shard_numel)]
        return [piece.target for piece in self.pieces_of(rank) if self.sizes[piece.index][0] is not None]

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The piece of each parameter on each rank."""
        pieces = []
        for index, (rows, row_numel) in enumerate(self.sizes):
            for rank in range(self.world_size):
                numel = self.num_rows(index, rank) * row_numel
                if numel:
                    start = 0 if rows is None else rank * self.widths[index]
                    source = Span(start, start + numel)
                    pieces.append(Piece(index, rank, source, Span(0, numel).shift(self.columns[index])))
        return tuple(pieces)

    @cached_property
    def blocks(self) -> tuple[Sequence[Block], ...]:
        """For each parameter the rectangles that hold it: one, or two if a rank's rows do not fill its columns."""
        return tuple(self._blocks_of(index) for index in range(len(self.sizes)))

    def _blocks_of(self, index: int) -> list[Block]:
        numel, width = self.numels[index], self.widths[index]
        if not numel:
            return []
        columns = Span(0, width).shift(self.columns[index])
        if self.sizes[index][0] is None:
            return [Block(Span(0, self.world_size), columns, Span(0, numel))]
        full, rest = divmod(numel, width)
        blocks = [Block(Span(0, full), columns, Span(0, full * width))] if full else []
        if rest:
            short = Span(columns.start, columns.start + rest)
            blocks.append(Block(Span(full, full + 1), short, Span(full * width, numel)))
        return blocks

    @cached_property
    def empty_blocks(self) -> list[Block]:
        """The rectangles without elements; they are zero in every transfer."""
        blocks = []
        for index, (numel, width) in enumerate(zip(self.numels, self.widths, strict=True)):
            if not width or self.sizes[index][0] is None:
                continue
            columns = Span(0, width).shift(self.columns[index])
            full, rest = divmod(numel, width)
            if rest:
                blocks.append(Block(Span(full, full + 1), Span(columns.start + rest, columns.stop), Span(0, 0)))
            first_empty = full + bool(rest)
            if first_empty < self.world_size:
                blocks.append(Block(Span(first_empty, self.world_size), columns, Span(0, 0)))
        return blocks
