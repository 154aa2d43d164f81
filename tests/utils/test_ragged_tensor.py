"""The placement of unequal rows says what the layout says, and never passes for torch's even chunks."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from fairshard.settings.placements import RowBlocks
from fairshard.utils.placed_layout import RaggedLayout
from fairshard.utils.ragged_plan import Blocks, plan_line
from fairshard.utils.ragged_tensor import RaggedShard
from fairshard.views.ragged import Ragged

shapes = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 4)).map(torch.Size), min_size=1, max_size=5)


@given(shapes, st.integers(1, 3), st.integers(1, 6))
def test_rows_on_ranks_are_those_of_the_layout(shapes, num_rows, world_size):
    """For every rank, the rows of the placement are the elements that the layout gives it, in whole blocks."""
    tensors = [Blocks(RowBlocks(num_rows).block_of(shape), shape.numel()) for shape in shapes]
    plan = plan_line(tensors, range(len(tensors)), world_size)
    placed = [shapes[index] for index in plan.members]
    layout = RaggedLayout([shape.numel() for shape in placed], plan.offsets, plan.width, world_size)
    for rank in range(world_size):
        line = Ragged(placed, rank, layout)
        owned = {piece.index: piece.source for piece in layout.pieces_of(rank)}
        for index, shape in enumerate(placed):
            rows = line.placement(index).rows_on(rank, shape[0])
            assert line.own_shape(index) == (rows.numel, *shape[1:])
            source = owned.get(index)
            assert rows.numel * shape[1] == (0 if source is None else source.numel)
            if source is not None:
                assert (rows.start * shape[1], rows.start % num_rows) == (source.start, 0)


@given(st.integers(0, 3), st.integers(0, 5), st.integers(0, 5), st.integers(0, 20))
def test_rows_follow_each_other(first, head, each, num_rows):
    """No rank has rows before those of the previous one, and none has more than there are."""
    placement, end = RaggedShard(first, head, each), 0
    for rank in range(8):
        rows = placement.rows_on(rank, num_rows)
        if rows.numel:
            assert rows.start == end
            end = rows.stop
    assert end <= num_rows


def test_placements_compare_and_copy():
    """Equal placements are equal after pickle and deepcopy; none equals one of torch's."""
    one = RaggedShard(1, 2, 3)
    for other in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one), RaggedShard(1, 2, 3)):
        assert other == one
        assert hash(other) == hash(one)
    assert repr(one) == "RaggedShard(first=1, head=2, each=3)"
    assert one not in (RaggedShard(0, 2, 3), Shard(0), Replicate())


def test_a_placement_is_sharded_but_has_no_dimension():
    """Code that asks learns that the first dimension is sharded; code that would cut evenly along it raises."""
    placement = RaggedShard(0, 1, 2)
    assert placement.is_shard()
    assert placement.is_shard(0)
    assert not placement.is_shard(1)
    assert not placement.is_replicate()
    assert not placement.is_partial()
    with pytest.raises(AttributeError, match=r"RaggedShard\(first=0, head=1, each=2\) has no `dim`"):
        _ = placement.dim
