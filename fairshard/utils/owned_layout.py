r"""Layout of parameters that are each whole on one rank: on a line in the order of their owners.

Ranks own rows of unequal width, some of them none, and nothing is padded::

    line      | a a a a a a c c | b b b b d d d | | e e e e e |      4 ranks; rank 2 owns nothing
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

from fairshard.utils.block import Block
from fairshard.utils.ragged_layout import RaggedLayout
from fairshard.utils.span import Span


class OwnedLayout(RaggedLayout):
    """Parameters of ``numels`` elements, of which rank ``owners[index]`` owns all.

    ``shard_numel`` is the width of the longest row; blocks are those of ``[W, shard_numel]``, in which the shorter rows
    are padded. ``widths`` are the widths of the rows on the line.
    """

    def __init__(self, numels: Sequence[int], owners: Sequence[int], world_size: int) -> None:
        widths, columns = [0] * world_size, []
        for numel, owner in zip(numels, owners, strict=True):
            columns.append(widths[owner])
            widths[owner] += numel
        starts = list(accumulate(widths, initial=0))
        offsets = [starts[owner] + column for owner, column in zip(owners, columns, strict=True)]
        super().__init__(numels, offsets, max(widths), world_size)
        self.owners, self.widths, self._columns = tuple(owners), tuple(widths), columns
        self.padded_numel, self.gaps = self.numel, ()

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

    @cached_property
    def blocks(self) -> tuple[Sequence[Block], ...]:
        """For each parameter the block that holds it; none for one without elements."""
        own = [(Span(owner, owner + 1), self.columns_of(index)) for index, owner in enumerate(self.owners)]
        return tuple([Block(row, span, span.shift(-span.start))] if span.numel else [] for row, span in own)

    @cached_property
    def empty_blocks(self) -> list[Block]:
        """The ends of the rows that are shorter than the longest."""
        ends = [Span(width, self.shard_numel) for width in self.widths]
        return [Block(Span(i, i + 1), end, end.shift(-end.start)) for i, end in enumerate(ends) if end.numel]

    def columns_of(self, index: int) -> Span:
        """The span of parameter ``index`` in its owner's row."""
        return Span(0, self.numels[index]).shift(self._columns[index])
