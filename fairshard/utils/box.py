"""A run of elements of an n-dimensional tensor as boxes, which `torch.distributed.checkpoint` saves and loads.

A flat span is rarely one box, but at most ``2n - 1`` boxes: the end of a row, whole rows, the beginning of a row, and
so on inward. For shape ``(4, 5)`` and the span ``[3, 17)``::

    . . . a a      a: offsets (0, 3), sizes (1, 2), elements  0..2  of the span
    b b b b b      b: offsets (1, 0), sizes (2, 5), elements  2..12
    b b b b b
    c c . . .      c: offsets (3, 0), sizes (1, 2), elements 12..14
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from fairshard.utils.span import Span, overlap, part


@dataclass(frozen=True)
class Box:
    """A contiguous box of a tensor: its offsets, its sizes, and the elements of the run that it holds."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    span: Span


def boxes_of(shape: Sequence[int], span: Span) -> list[Box]:
    """The boxes that together hold the elements ``span`` of a flattened tensor of ``shape``, in order.

    ``span`` of each box counts from the start of the run. An empty tensor has one empty box, so that it is saved; an
    empty run of a non-empty tensor has no boxes.
    """
    if not prod(shape):
        return [Box((0,) * len(shape), tuple(shape), Span(0, 0))]
    return [Box(box.offsets, box.sizes, box.span.shift(-span.start)) for box in _boxes(tuple(shape), span, 0)]


def _boxes(shape: tuple[int, ...], span: Span, origin: int) -> list[Box]:
    """Like `boxes_of`, for a tensor whose first element is at ``origin`` on the line of the spans."""
    if not span.numel:
        return []
    if not shape:
        return [Box((), (), span)]
    inner = prod(shape[1:])
    first, last = (span.start - origin) // inner, -(-(span.stop - origin) // inner)
    rows = Span(origin + first * inner, origin + last * inner)
    whole = Span(first + (rows.start < span.start), last - (span.stop < rows.stop))
    if whole.numel < 0:  # begins and ends inside one row
        return _row(shape, span, origin, first)
    found = _row(shape, span, origin, first) if whole.start > first else []
    if whole.numel:
        elements = Span(origin + whole.start * inner, origin + whole.stop * inner)
        found.append(Box((whole.start, *(0 for _ in shape[1:])), (whole.numel, *shape[1:]), elements))
    if whole.stop < last:
        found += _row(shape, span, origin, last - 1)
    return found


def _row(shape: tuple[int, ...], span: Span, origin: int, row: int) -> list[Box]:
    elements = part(row, prod(shape[1:])).shift(origin)
    inner = _boxes(shape[1:], overlap(span, elements), elements.start)
    return [Box((row, *box.offsets), (1, *box.sizes), box.span) for box in inner]
