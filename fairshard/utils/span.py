"""Arithmetic of a line cut into spans. Imports nothing, knows no tensors."""

from typing import NamedTuple


class Span(NamedTuple):
    """A half-open interval ``[start, stop)`` of elements on a line."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements; 0 for an empty span."""
        return self.stop - self.start

    def shift(self, by: int) -> "Span":
        """The same interval seen from an origin ``by`` elements further left."""
        return Span(self.start + by, self.stop + by)


def overlap(a: Span, b: Span) -> Span:
    """The elements that ``a`` and ``b`` share; an empty span if they share none."""
    start = max(a.start, b.start)
    return Span(start, max(start, min(a.stop, b.stop)))


def cut(numel: int, parts: int) -> int:
    """Width of ``parts`` equal spans that together cover a line of ``numel``; the last may exceed it."""
    return -(-numel // parts)


def part(index: int, width: int) -> Span:
    """The ``index``-th span of a line cut into spans of ``width`` elements."""
    return Span(index * width, (index + 1) * width)
