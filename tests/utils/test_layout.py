"""A layout says where each element of each parameter lies, for any sizes and any number of ranks."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fairshard.utils.layout import FlatLayout
from fairshard.utils.placed_layout import OwnedLayout, RaggedLayout, RowsLayout
from fairshard.utils.ragged_plan import Blocks, plan_line

sizes = st.lists(st.integers(0, 9), min_size=1, max_size=6)
row_sizes = st.lists(st.one_of(st.tuples(st.integers(0, 9), st.integers(0, 3)), st.just((None, 1))), max_size=4)
block_sizes = st.lists(st.builds(Blocks, st.integers(1, 4), st.integers(0, 12)), min_size=1, max_size=6)
worlds = st.integers(1, 7)


def ragged(tensors, world_size):
    """The layout of a planned line of ``tensors``."""
    line = plan_line(tensors, range(len(tensors)), world_size)
    return RaggedLayout([tensors[index].numel for index in line.members], line.offsets, line.width, world_size)


@st.composite
def owned(draw):
    """A layout of parameters that have owners."""
    numels, world_size = draw(sizes), draw(worlds)
    return OwnedLayout(numels, [draw(st.integers(0, world_size - 1)) for _ in numels], world_size)


layouts = st.one_of(
    owned(),
    st.builds(FlatLayout, sizes, worlds),
    st.builds(RowsLayout, row_sizes, worlds),
    st.builds(ragged, block_sizes, worlds),
)


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


def filled_by_blocks(layout):
    """The rows ``[W, S]``, written block by block: parameters count from 1, padding is -1, what is left out is nan."""
    rows = torch.full((layout.world_size, layout.shard_numel), float("nan"))
    for value, block in [(-1, block) for block in layout.empty_blocks] + [
        (index + 1, block) for index, blocks in enumerate(layout.blocks) for block in blocks
    ]:
        target = block.of(rows)
        assert target.numel() > 0
        assert target.isnan().all()
        target.fill_(value)
    return rows


@given(layouts)
def test_blocks_fill_every_column_once(layout):
    """Blocks of parameters and of padding together fill the rows, at most three for each; pieces say the same."""
    rows = filled_by_blocks(layout)
    assert not rows.isnan().any()
    assert all(len(blocks) <= 3 for blocks in layout.blocks)
    expected = torch.full_like(rows, -1)
    for piece in layout.pieces:
        expected[piece.row, piece.target.start : piece.target.stop] = piece.index + 1
    assert torch.equal(rows, expected)


@given(sizes, worlds)
def test_blocks_hold_the_elements_in_order(numels, world_size):
    """Parameters copied to their blocks are the line that they are laid out on."""
    layout = FlatLayout(numels, world_size)
    rows = torch.zeros(world_size, layout.shard_numel)
    line = torch.arange(1.0, layout.numel + 1)
    for index, blocks in enumerate(layout.blocks):
        span = layout.param_span(index)
        for block in blocks:
            block.of(rows).copy_(block.like(line[span.start : span.stop]))
    assert torch.equal(rows.view(-1)[: layout.numel], line)


def test_blocks_are_few_on_many_ranks():
    """The number of blocks does not depend on the number of ranks."""
    layout = FlatLayout([10_000, 3, 2_000], 1_000)
    assert [len(blocks) for blocks in layout.blocks] == [2, 1, 3]
    assert len(layout.empty_blocks) == 2


@given(sizes, worlds)
def test_filled_says_how_much_of_each_row_belongs_to_parameters(numels, world_size):
    """`filled` counts each rank's elements of parameters, and `pieces_of` names them."""
    layout = FlatLayout(numels, world_size)
    line = line_of(layout)
    for rank in range(world_size):
        row = line[rank * layout.shard_numel : (rank + 1) * layout.shard_numel]
        assert layout.filled(rank) == sum(element is not None for element in row)
        assert [piece for piece in layout.pieces if piece.row == rank] == list(layout.pieces_of(rank))


@given(owned())
def test_owned_parameters_are_whole_on_the_line_and_in_their_rows(layout):
    """Rows follow each other without padding, and a parameter lies in its owner's row alone, also in a part of them."""
    line, rows = [None] * layout.numel, []
    for index, numel in enumerate(layout.numels):
        span = layout.param_span(index)
        assert line[span.start : span.stop] == [None] * numel
        line[span.start : span.stop] = [(index, element) for element in range(numel)]
    start = 0
    for rank, width in enumerate(layout.widths):
        rows.append(line[start : start + width])
        start += width
        own = {index for index, numel in enumerate(layout.numels) if numel and layout.owners[index] == rank}
        assert {index for index, _ in rows[rank]} == own
        for piece in layout.pieces_of(rank):
            elements = range(layout.numels[piece.index])
            assert rows[rank][piece.target.start : piece.target.stop] == [(piece.index, each) for each in elements]
    assert start == layout.numel == layout.padded_numel
    assert None not in line
    kept = list(range(0, len(layout.numels), 2))
    assert layout.of(kept).owners == tuple(layout.owners[index] for index in kept)
