"""A run of elements is split into few boxes that cover it in order."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from fairshard.utils.span import Span
from fairshard.utils.span_tensor import Box, boxes_of

shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@given(shapes, st.data())
def test_boxes_are_the_run(shape, data):
    """At most ``2n - 1`` boxes, written back to back, give every element of the run once."""
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    whole = torch.arange(numel).view(shape)
    boxes = boxes_of(shape, Span(start, stop))
    found = []
    for box in boxes:
        part = whole[tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))]
        assert part.numel() == box.span.numel
        assert box.span.start == len(found)
        found += part.flatten().tolist()
    assert found == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    assert len({box.offsets for box in boxes}) == len(boxes)


def test_the_drawing_of_the_docstring():
    """The span [3, 17) of shape (4, 5) is the end of a row, two whole rows, and the beginning of a row."""
    assert boxes_of((4, 5), Span(3, 17)) == [
        Box((0, 3), (1, 2), Span(0, 2)),
        Box((1, 0), (2, 5), Span(2, 12)),
        Box((3, 0), (1, 2), Span(12, 14)),
    ]


def test_empty_things():
    """An empty tensor is one empty box, so that it is saved; an empty run of another tensor has no box."""
    assert boxes_of((0, 3), Span(0, 0)) == [Box((0, 0), (0, 3), Span(0, 0))]
    assert boxes_of((2, 3), Span(4, 4)) == []
    assert boxes_of((), Span(0, 1)) == [Box((), (), Span(0, 1))]
    assert boxes_of((), Span(0, 0)) == []
