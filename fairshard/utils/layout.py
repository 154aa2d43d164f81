r"""Position of each parameter on a flat line, and the parts that each rank owns.

The parameters of one flat param are laid end to end and padded to ``world_size * shard_numel`` elements. Rank
``r`` owns row ``r`` of the line seen as ``[world_size, shard_numel]``::

    line      | weight ------------------- | bias - | pad |        numel = 21, padded to 24
    rows      |   rank 0   |   rank 1   |   rank 2   |             3 ranks, shard_numel = 8
    bucket    row 0: weight[0:8]                                   a row may carry the shards of
              row 1: weight[8:16]                                  several flat params side by side,
              row 2: weight[16:18] bias[0:3] pad                   each in its own columns

All arithmetic is on integers: shards, buckets and state dicts use it, and tests need no process group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from fairshard.utils.block import Block, rectangles
from fairshard.utils.span import Span, cut, overlap, part


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
    """Parameters of given sizes laid end to end on a line that is sharded over ``world_size`` ranks."""

    def __init__(self, numels: Sequence[int], world_size: int) -> None:
        self.numels = tuple(numels)
        self.world_size = world_size
        self.numel = sum(self.numels)
        self.shard_numel = cut(self.numel, world_size)
        self.padded_numel = self.shard_numel * world_size
        self.offsets = tuple(accumulate(self.numels, initial=0))[:-1]
        self.gaps: tuple[Span, ...] = (Span(self.numel, self.padded_numel),)  # the padding

    def param_span(self, index: int) -> Span:
        """Span of parameter ``index`` on the line."""
        return Span(0, self.numels[index]).shift(self.offsets[index])

    def filled(self, rank: int) -> int:
        """Number of leading elements of row ``rank`` that belong to parameters; the rest is padding."""
        return overlap(part(rank, self.shard_numel), Span(0, self.numel)).numel

    def counted(self, rank: int) -> list[Span]:
        """Spans of row ``rank`` to count in sums over ranks, so that each element of a parameter counts once."""
        return [Span(0, self.filled(rank))]

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Every (parameter, row) overlap, parameter by parameter."""
        blocks = [(index, block) for index, own in enumerate(self.blocks) for block in own]
        return tuple(Piece(index, row, span, block.columns) for index, block in blocks for row, span in block.by_row())

    @cached_property
    def blocks(self) -> tuple[Sequence[Block], ...]:
        """For each parameter the blocks that hold it."""
        return tuple(rectangles(self.param_span(index), self.shard_numel) for index in range(len(self.numels)))

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
