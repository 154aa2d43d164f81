"""Spans are sets of elements on a line."""

from hypothesis import given
from hypothesis import strategies as st

from fairshard.utils.span import Span, cut, overlap, part

spans = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: Span(min(pair), max(pair)))


def elements(span):
    return set(range(span.start, span.stop))


@given(spans, spans)
def test_overlap_is_the_intersection(a, b):
    """The overlap of two spans holds exactly the elements that both hold, in either order."""
    assert elements(overlap(a, b)) == elements(a) & elements(b)
    assert elements(overlap(b, a)) == elements(a) & elements(b)
    assert overlap(a, b).numel >= 0


@given(spans, st.integers(-40, 40))
def test_shift_keeps_the_size(span, by):
    """A shifted span has as many elements, each moved by the same number."""
    assert span.shift(by).numel == span.numel == len(elements(span))
    assert span.shift(by).shift(-by) == span


@given(st.integers(0, 100), st.integers(1, 12))
def test_parts_cover_the_line_once(numel, parts):
    """The spans of a cut line do not overlap, cover the line, and are as short as possible."""
    width = cut(numel, parts)
    pieces = [part(index, width) for index in range(parts)]
    covered = [element for piece in pieces for element in elements(piece)]
    assert len(covered) == len(set(covered)) >= numel
    assert set(range(numel)) <= set(covered)
    assert width * parts - numel < parts
