"""The table of units tells sizes that can be computed by hand."""

import pytest
import torch

from fairshard.nn.data_parallel.summary import unit_table
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
