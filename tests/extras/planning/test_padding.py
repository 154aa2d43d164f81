"""Parameters that are placed by blocks have layouts and padding of their own in a plan."""

import pytest
import torch
from torch import nn

from fairshard.nn import RowBlocks, ShardingStrategy
from fairshard.nn.wrap import ModuleWrapPolicy, describe
from fairshard.planning.padding import OwnedBytes, PaddingRow, padding_lines
from fairshard.settings.placements import Owned


def matrices_by_blocks(param):
    """Rows of matrices stay whole; other parameters are cut anywhere."""
    return RowBlocks() if param.dim() > 1 else None


def test_a_plan_counts_padding():
    """5 rows of 7 and 3 of 11 on 2 ranks: 3 + 0 rows, 2 + 3 rows of 47 elements each; the bias is cut by itself."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 5, bias=False), nn.Linear(11, 3))
    plan = describe(model, None, 2, placement_fn=matrices_by_blocks)
    (row,) = plan.padding
    assert row.numel == 5 * 7 + 3 * 11
    # 34 elements on each rank would be no padding, but cuts fall at 33 or 35
    assert (row.padded, row.least, row.num_lines) == (2 * 35, 2 * 34, 1)
    # the shard holds a row of that line, and one of the 3 elements of the bias
    assert plan.units[0].shard_nbytes == 4 * (35 + 2)


def test_a_unit_that_is_not_sharded_has_no_padding():
    """With NO_SHARD every rank has all blocks."""
    with torch.device("meta"):
        model = nn.Linear(7, 5)
    strategy = ShardingStrategy.NO_SHARD
    plan = describe(model, None, 4, placement_fn=matrices_by_blocks, sharding_strategy=strategy)
    assert plan.padding[0].padding == 0


def test_only_units_with_blocks_are_listed():
    """A unit without parameters placed by blocks has no row; without any, there is no table."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5))
    plan = describe(model, ModuleWrapPolicy({nn.LayerNorm, nn.Linear}), 2, placement_fn=matrices_by_blocks)
    assert [row.fqn for row in plan.padding] == ["0"]
    assert "padding" in str(plan)
    assert "padding" not in str(describe(model, None, 2))


def test_a_plan_counts_what_ranks_own():
    """Memory is that of the rank that owns most of the whole model; owners are chosen inner units first."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 6, bias=False), nn.Linear(10, 7, bias=False))
    model.register_parameter("own", nn.Parameter(torch.empty(5, 10, device="meta")))
    plan = describe(model, ModuleWrapPolicy({nn.Linear}), 2, placement_fn=lambda param: Owned())
    # rank 0: 70 of unit 2 and 50 of the root; rank 1: 60 of unit 1 and 100 of unit 0
    assert plan.owned == OwnedBytes(4 * 120, 4 * 280, 4 * 160, 2)
    assert [(row.fqn, row.shard_nbytes, row.full_nbytes) for row in plan.units] == [
        ("", 0, 200), ("0", 400, 400), ("1", 240, 240), ("2", 0, 280),
    ]  # fmt: skip
    (shards,) = [term.nbytes for term in plan.terms if term.name == "shards"]
    assert shards == 4 * 160
    *_, line, warning = str(plan).splitlines()
    assert line == "owned by one rank each: 480 to 640 bytes a rank, 560 on average"
    assert warning.startswith("warning: one rank owns 14% more than the mean")
    assert describe(model, None, 2).owned is None


@pytest.mark.parametrize(("padded", "warns"), [(110, False), (112, True)])
def test_a_warning_above_a_tenth(padded, warns):
    """The warning names the unit with most padding, not the one with the largest fraction."""
    rows = [PaddingRow("small", 10, 15, 10, 1), PaddingRow("large", 90, padded - 15, 90, 1)]
    *_, last = padding_lines(rows)
    assert last.startswith("warning") == warns
    assert not warns or "unit large" in last


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
