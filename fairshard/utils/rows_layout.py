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
from functools import cached_property
from itertools import accumulate

from torch import Tensor

from fairshard.utils.block import Block, rectangles
from fairshard.utils.layout import FlatLayout
from fairshard.utils.span import Span, cut


class RepeatedBlock(Block):
    """A block of which every row holds all elements of ``source``."""

    def by_row(self) -> list[tuple[int, Span]]:
        """Each row of the block, and the elements of the parameter, which are in all of them."""
        return [(row, self.source) for row in range(*self.rows) if self.source.numel]

    def like(self, flat: Tensor) -> Tensor:
        """See `Block.like`."""
        return flat[self.source.start : self.source.stop].expand(self.shape)


class RowsLayout(FlatLayout):
    """Parameters, each of ``(D, elements per row)``, sharded by rows over ``world_size`` ranks.

    `param_span` is a parameter's span on the line; `pieces` and blocks describe the buffer.
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
    def blocks(self) -> tuple[Sequence[Block], ...]:
        """For each parameter the blocks that hold it: one, or two if a rank's rows do not fill its columns."""
        return tuple(self._blocks_of(index) for index in range(len(self.sizes)))

    def _blocks_of(self, index: int) -> list[Block]:
        if self.sizes[index][0] is not None:
            return rectangles(Span(0, self.numels[index]), self.widths[index], self.columns[index])
        source = Span(0, self.numels[index])
        return [RepeatedBlock(Span(0, self.world_size), source.shift(self.columns[index]), source)]

    @cached_property
    def empty_blocks(self) -> list[Block]:
        """The blocks of the padding; they are zero in every transfer."""
        cut_params = [index for index, (rows, _) in enumerate(self.sizes) if rows is not None]
        return [block for index in cut_params for block in self._padding_of(index)]

    def _padding_of(self, index: int) -> list[Block]:
        width = self.widths[index]
        return rectangles(Span(self.numels[index], width * self.world_size), width, self.columns[index])
