r"""Layout of parameters that are cut between blocks only: on the line where a plan has placed them.

Every rank owns a row of equal width, as on a flat line, but no cut falls inside a block. The parameters need not touch,
and a rank may have nothing of most of them::

    line      | a a a a a a . | a a a b b b . | b b b c d d . |      3 ranks, 7 elements each
    blocks    a and b: 3 elements, c: 1, d: 2                        ".": padding, which is zero
"""

from __future__ import annotations

from collections.abc import Sequence

from fairshard.utils.layout import FlatLayout
from fairshard.utils.span import Span


class RaggedLayout(FlatLayout):
    """Parameters of ``numels`` elements at ``offsets`` of a line of ``world_size`` rows of ``width`` elements."""

    def __init__(self, numels: Sequence[int], offsets: Sequence[int], width: int, world_size: int) -> None:
        super().__init__(numels, world_size)
        self.offsets = tuple(offsets)
        self.shard_numel = width
        self.padded_numel = width * world_size
        self.gaps = _gaps([self.param_span(index) for index in range(len(self.numels))], self.padded_numel)

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


def _gaps(spans: Sequence[Span], stop: int) -> tuple[Span, ...]:
    """The parts of a line of ``stop`` elements that ``spans`` leave empty, in order."""
    found, end = [], 0
    for span in [*sorted(spans), Span(stop, stop)]:
        if span.start > end:
            found.append(Span(end, span.start))
        end = max(end, span.stop)
    return tuple(found)
