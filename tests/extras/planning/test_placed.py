"""Parameters that are placed by blocks or owners have layouts of their own in a plan."""

import pytest
import torch
from torch import nn

from fairshard.nn import RowBlocks
from fairshard.nn.wrap import ModuleWrapPolicy, describe
from fairshard.settings.placements import Owned


def matrices_by_blocks(param):
    """Rows of matrices stay whole; other parameters are cut anywhere."""
    return RowBlocks() if param.dim() > 1 else None


def test_a_plan_counts_padding():
    """5 rows of 7 and 3 of 11 on 2 ranks: 3 + 0 rows, 2 + 3 rows of 47 elements each; the bias is cut by itself."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 5, bias=False), nn.Linear(11, 3))
    plan = describe(model, None, 2, placement_fn=matrices_by_blocks)
    # 34 elements of 5 * 7 + 3 * 11 on each rank would be no padding, but cuts fall at 33 or 35
    # the shard holds a row of that line, and one of the 3 elements of the bias
    assert plan.units[0].shard_nbytes == 4 * (35 + 2)


def test_a_plan_counts_what_ranks_own():
    """Memory is that of the rank that owns most of the whole model; owners are chosen inner units first."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 6, bias=False), nn.Linear(10, 7, bias=False))
    model.register_parameter("own", nn.Parameter(torch.empty(5, 10, device="meta")))
    plan = describe(model, ModuleWrapPolicy({nn.Linear}), 2, placement_fn=lambda param: Owned())
    # rank 0: 70 of unit 2 and 50 of the root; rank 1: 60 of unit 1 and 100 of unit 0
    assert [(row.fqn, row.shard_nbytes, row.full_nbytes) for row in plan.units] == [
        ("", 0, 200), ("0", 400, 400), ("1", 240, 240), ("2", 0, 280),
    ]  # fmt: skip
    (shards,) = [term.nbytes for term in plan.terms if term.name == "shards"]
    assert shards == 4 * 160


def test_other_placements_are_refused():
    """A placement that is neither a RowBlocks nor None raises, and names the parameter."""
    with torch.device("meta"):
        model = nn.Linear(7, 5)
    with pytest.raises(TypeError, match=r"must return a RowBlocks, an Owned or None, but returned 0 for `weight`"):
        describe(model, None, 2, placement_fn=lambda param: 0)


@pytest.mark.parametrize("rows", [0, -1, 1.5, True, None])
def test_rows_of_blocks_are_positive(rows):
    """A block has at least one row."""
    with pytest.raises(ValueError, match=r"`RowBlocks\(rows\)` must be a number of rows, at least 1, but is"):
        RowBlocks(rows)


@pytest.mark.parametrize("rank", [-1, 0.5, True, "0"])
def test_owners_are_ranks(rank):
    """An owner is a rank, or left to the planner."""
    with pytest.raises(ValueError, match=r"`Owned\(rank\)` must be a rank"):
        Owned(rank)


@pytest.mark.parametrize(
    ("shape", "rows", "block"), [((6, 4), 1, 4), ((6, 4), 3, 12), ((6,), 2, 2), ((3, 4, 5), 1, 20), ((5, 0), 2, 1)]
)
def test_blocks_are_rows_of_the_first_dimension(shape, rows, block):
    """A row is a slice along the first dimension: an element of a vector, a matrix of a stack."""
    assert RowBlocks(rows).block_of(shape) == block
