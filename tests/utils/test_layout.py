"""A layout says where each element of each parameter lies, for any sizes and any number of ranks."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fairshard.utils.layout import FlatLayout

sizes = st.lists(st.integers(0, 9), min_size=1, max_size=6)
worlds = st.integers(1, 7)


def line_of(layout):
    """The line as ``(parameter, element)`` pairs, padding as None: built the slow way."""
    pairs = [(index, element) for index, numel in enumerate(layout.numels) for element in range(numel)]
    return pairs + [None] * (layout.padded_numel - len(pairs))


@given(sizes, worlds)
def test_shards_are_equal_and_padded_least(numels, world_size):
    """All ranks own the same number of elements, the smallest that suffices."""
    layout = FlatLayout(numels, world_size)
    assert layout.numel == sum(numels)
    assert layout.padded_numel == layout.shard_numel * world_size
    assert 0 <= layout.padded_numel - layout.numel < world_size


@given(sizes, worlds)
def test_pieces_name_every_element_once(numels, world_size):
    """Reading the rows piece by piece gives the line: every element once, at its place."""
    layout = FlatLayout(numels, world_size)
    rows = [[None] * layout.shard_numel for _ in range(world_size)]
    for piece in layout.pieces:
        assert piece.source.numel == piece.target.numel > 0
        for source, target in zip(range(*piece.source), range(*piece.target), strict=True):
            assert rows[piece.row][target] is None
            rows[piece.row][target] = (piece.index, source)
    assert [element for row in rows for element in row] == line_of(layout)


@given(sizes, worlds)
def test_padding_is_the_rest(numels, world_size):
    """Pieces and padding together fill every column of every row."""
    layout = FlatLayout(numels, world_size)
    filled = sum(piece.target.numel for piece in (*layout.pieces, *layout.padding))
    assert filled == layout.padded_numel
    line = line_of(layout)
    for piece in layout.padding:
        start = piece.row * layout.shard_numel
        assert all(line[start + column] is None for column in range(*piece.target))
    for rank in range(world_size):
        row = line[rank * layout.shard_numel : (rank + 1) * layout.shard_numel]
        assert layout.filled(rank) == sum(element is not None for element in row)
        assert [piece for piece in layout.pieces if piece.row == rank] == list(layout.pieces_of(rank))


@given(sizes, worlds)
def test_param_spans_are_slices_of_the_line(numels, world_size):
    """Cutting the concatenated parameters at their spans gives them back."""
    layout = FlatLayout(numels, world_size)
    values = [torch.full((numel,), float(index)) for index, numel in enumerate(numels)]
    line = torch.cat(values)
    for index, value in enumerate(values):
        span = layout.param_span(index)
        assert torch.equal(line[span.start : span.stop], value)
