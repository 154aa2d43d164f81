"""Layouts of parameters that are placed: cut by rows, cut between blocks only, or each whole on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torch import Tensor

from fairshard.utils.layout import Block, FlatLayout, Piece, rectangles
from fairshard.utils.span import Span, cut


class RaggedLayout(FlatLayout):
    r"""Parameters that are cut between blocks only: at ``offsets`` of a line with rows of ``width``, by a plan.

    No cut falls inside a block. The parameters need not touch, and a rank may have nothing of most of them::

        line      | a a a a a a . | a a a b b b . | b b b c d d . |      3 ranks, 7 elements each
        blocks    a and b: 3 elements, c: 1, d: 2                        ".": padding, which is zero
    """

    def __init__(self, numels: Sequence[int], offsets: Sequence[int], width: int, world_size: int) -> None:
        self._lay(numels, world_size, width, offsets)

    @cached_property
    def gaps(self) -> tuple[Span, ...]:
        """The parts of the rows ``[W, S]``, laid end to end, that parameters leave empty, in order."""
        spans = [Span(place, place + numel) for place, numel in zip(self.places, self.numels, strict=True)]
        found, end = [], 0
        for span in [*sorted(spans), Span(stop := self.shard_numel * self.world_size, stop)]:
            if span.start > end:
                found.append(Span(end, span.start))
            end = max(end, span.stop)
        return tuple(found)

    def of(self, indexes: Sequence[int]) -> RaggedLayout:
        """The parameters ``indexes`` alone, each where it is; the others leave their places empty."""
        numels, offsets = ([values[index] for index in indexes] for values in (self.numels, self.offsets))
        return RaggedLayout(numels, offsets, self.shard_numel, self.world_size)

    def describe(self, index: int) -> str:
        """Where parameter ``index`` lies, in words; equal on all ranks."""
        return f"at {self.offsets[index]} of {self.padded_numel}"

    def filled(self, rank: int) -> int:
        """The whole row: padding is between parameters, and is zero."""
        return self.shard_numel


class OwnedLayout(RaggedLayout):
    r"""Parameters of ``numels`` elements, of which rank ``owners[index]`` owns all, on a line in the order of owners.

    Ranks own rows of unequal ``widths``, some of them none, and nothing is padded on the line::

        line      | a a a a a a c c | b b b b d d d | | e e e e e |      4 ranks; rank 2 owns nothing

    ``shard_numel`` is the width of the longest row; in the rows ``[W, shard_numel]`` the shorter ones are padded.
    """

    def __init__(self, numels: Sequence[int], owners: Sequence[int], world_size: int) -> None:
        widths, columns = [0] * world_size, []
        for numel, owner in zip(numels, owners, strict=True):
            columns.append(widths[owner])
            widths[owner] += numel
        longest, starts = max(widths), list(accumulate(widths, initial=0))
        self.owners, self.widths, self._columns = tuple(owners), tuple(widths), columns
        pairs = list(zip(owners, columns, strict=True))
        self._lay(numels, world_size, longest, [owner * longest + column for owner, column in pairs])
        self.offsets, self.padded_numel = tuple(starts[owner] + column for owner, column in pairs), self.numel

    def of(self, indexes: Sequence[int]) -> OwnedLayout:
        """The parameters ``indexes`` alone, with the same owners; no place is left empty."""
        numels, owners = ([values[index] for index in indexes] for values in (self.numels, self.owners))
        return OwnedLayout(numels, owners, self.world_size)

    def describe(self, index: int) -> str:
        """The owner of parameter ``index``, in words; equal on all ranks."""
        return f"on rank {self.owners[index]} of {self.world_size}"

    def filled(self, rank: int) -> int:
        """Number of elements of row ``rank``."""
        return self.widths[rank]

    def columns_of(self, index: int) -> Span:
        """The span of parameter ``index`` in its owner's row."""
        return Span(0, self.numels[index]).shift(self._columns[index])


class RepeatedBlock(Block):
    """A block of which every row holds all elements of ``source``."""

    def by_row(self) -> list[tuple[int, Span]]:
        """Each row of the block, and the elements of the parameter, which are in all of them."""
        return [(row, self.source) for row in range(*self.rows) if self.source.numel]

    def like(self, flat: Tensor) -> Tensor:
        """See `Block.like`."""
        return flat[self.source.start : self.source.stop].expand(self.shape)


class RowsLayout(FlatLayout):
    r"""Parameters, each of ``(D, elements per row)``, sharded by rows: their columns in the gathered buffer.

    A parameter of ``D`` rows (slices along the dimension that is cut) gives every rank ``ceil(D / world_size)`` rows,
    the last ranks fewer or none, as DTensor's ``Shard`` does. Rank ``r``'s rows of all parameters are side by side in
    row ``r`` of the buffer::

        buffer [W, S]    | weight       | bias |        weight (5, 2), bias (5,), on 2 ranks: 3 rows each
        row 0            | w0 w1 w2     | b0-2 |
        row 1            | w3 w4 pad    | b3-4 |
        line             | w0 w1 w2 w3 w4 | b0-4 |      whole parameters one after the other: copied out of the buffer

    A parameter without dimensions (``D`` None) is whole in every row. `param_span` is a parameter's span on the line;
    `pieces` and blocks describe the buffer.
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
        source = Span(0, self.numels[index])
        if self.sizes[index][0] is not None:
            return rectangles(source, self.widths[index], self.columns[index])
        return [RepeatedBlock(Span(0, self.world_size), source.shift(self.columns[index]), source)]

    @cached_property
    def empty_blocks(self) -> list[Block]:
        """The blocks of the padding; they are zero in every transfer."""
        ends = [
            (Span(numel, width * self.world_size), width, column)
            for numel, width, column, (rows, _) in zip(self.numels, self.widths, self.columns, self.sizes, strict=True)
            if rows is not None
        ]
        return [block for end in ends for block in rectangles(*end)]


@dataclass(frozen=True)
class Runs:
    """The runs of one parameter, one per rank, each at the start of a row of ``shard_numel`` elements."""

    pieces: tuple[Piece, ...]
    world_size: int
    shard_numel: int

    def pieces_of(self, rank: int) -> list[Piece]:
        """The pieces that rank ``rank`` owns, parameter by parameter."""
        return [piece for piece in self.pieces if piece.row == rank]

    @staticmethod
    def of(layout: FlatLayout, index: int) -> Runs:
        """Those of parameter ``index`` of ``layout``."""
        own = [piece for piece in layout.pieces if piece.index == index]
        pieces = tuple(Piece(0, piece.row, piece.source, Span(0, piece.source.numel)) for piece in own)
        return Runs(pieces, layout.world_size, max((piece.source.numel for piece in own), default=0))
