"""The table of units has the sizes computed by hand."""

import pytest
import torch

from fairshard.nn import MixedPrecisionPolicy, fully_shard
from fairshard.planning.summary import UnitRow, unit_lines, unit_table
from tests.models import mlp, wrap_each
from tests.on_ranks import on_ranks


@on_ranks(2, 3)
@pytest.mark.parametrize(("kwargs", "compute"), [({}, 4), ({"mixed_precision": True}, 2)], ids=["fp32", "fp16"])
def test_sizes_of_units(kwargs, compute):
    """Parameters, shard bytes (fp32) and full bytes (compute dtype, padded) of each unit, outermost first."""
    world_size = torch.distributed.get_world_size()
    rows = unit_table(wrap_each(mlp(4, 9, 5), **kwargs))
    sizes = [0, 4 * 9 + 9, 9 * 5 + 5]
    shards = [-(-size // world_size) for size in sizes]
    assert [row.fqn for row in rows] == ["", "0", "2"]
    assert [row.numel for row in rows] == sizes
    assert [row.shard_nbytes for row in rows] == [4 * shard for shard in shards]
    assert [row.full_nbytes for row in rows] == [compute * world_size * shard for shard in shards]
    assert [row.grad_nbytes for row in rows] == [4 * shard for shard in shards]


@on_ranks(2, 3)
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_sizes_of_units_cut_by_rows(param_dtype):
    """With ``fully_shard`` each parameter, sharded or gathered, is padded to the same number of rows on every rank."""
    world_size = torch.distributed.get_world_size()
    policy, compute = MixedPrecisionPolicy(param_dtype), (param_dtype or torch.float32).itemsize
    model = mlp(4, 9, 5)
    for part in (model[0], model[2], model):
        fully_shard(part, mp_policy=policy)
    shards = [0, *(-(-rows // world_size) * (width + 1) for width, rows in ((4, 9), (9, 5)))]
    rows = unit_table(model)
    assert [row.fqn for row in rows] == ["", "0", "2"]
    assert [row.numel for row in rows] == [0, 4 * 9 + 9, 9 * 5 + 5]
    assert [row.shard_nbytes for row in rows] == [4 * shard for shard in shards]
    assert [row.full_nbytes for row in rows] == [compute * world_size * shard for shard in shards]
    assert [row.grad_nbytes for row in rows] == [4 * shard for shard in shards]


@pytest.mark.parametrize(("numel", "warned"), [(50, False), (51, True)])
def test_a_unit_with_more_than_half_of_the_model_is_warned_of(numel, warned):
    """The warning names the unit; exactly half of the parameters does not warn."""
    rows = [UnitRow("", 100 - numel, 1, 2, 3), UnitRow("blocks.0", numel, 30, 40, 50)]
    lines = unit_lines(rows)
    assert ("warning: unit blocks.0 holds 51%" in lines[-1]) == warned
    table = lines[:-1] if warned else lines
    assert len({len(line) for line in table}) == 1
    assert table[-1].split() == ["all", "100", "31", "B", "42", "B", "53", "B"]
    assert [line.split()[0] for line in table if line[0] != "-"] == ["unit", "(root)", "blocks.0", "all"]
