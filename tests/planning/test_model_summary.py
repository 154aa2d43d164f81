"""The summary of a sharded model says what a user asked for, in text and in HTML."""

import json

import pytest
import torch
from torch import nn

import fairshard
from fairshard.nn import MixedPrecisionPolicy, Owned
from tests.kit import fake_group
from tests.models import mlp
from tests.on_ranks import on_ranks


def test_the_wrapper():
    """Sizes, strategy, precision and place of each unit; a MB is 2**20 bytes."""
    with fake_group(2):
        half = fairshard.FSDP(nn.Linear(1024, 1024, bias=False), mixed_precision=True, compute_dtype=torch.bfloat16)
        offloaded = fairshard.FSDP(nn.Linear(1024, 512, bias=False), cpu_offload=True)
        found = fairshard.summary(fairshard.FSDP(nn.Sequential(half, offloaded)))
    root, first, second = (line.split() for line in str(found).splitlines()[2:5])
    assert root == ["(root)", "Sequential", "0", "0.00", "0.00", "0.00", "FULL_SHARD", "over", "2"]
    assert first[:6] == ["0", "Linear", f"{1024 * 1024:,}", "2.00", "2.00", "2.00"]  # fp32 halves; bf16 whole
    assert first[6:] == ["FULL_SHARD", "over", "2", "flat", "float32", "bfloat16", "bfloat16", "cpu"]
    assert second[:6] == ["1", "Linear", f"{512 * 1024:,}", "1.00", "2.00", "1.00"]
    assert second[-4:] == ["float32", "float32", "float32", "host"]
    assert "unit 0 holds 67% of the parameters" in str(found)


def test_modules_sharded_in_place():
    """The module's own class is named, and how its parameters are cut."""
    with fake_group(2):
        model = mlp(8, 8, 8)
        fairshard.fully_shard(model[0], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        fairshard.fully_shard(model[2], shard_placement_fn=lambda param: Owned())
        found = fairshard.summary(fairshard.fully_shard(model))
    by_name = {unit.sizes.fqn: unit for unit in found.units}
    assert [by_name[name].module for name in ("", "0", "2")] == ["Sequential", "Linear", "Linear"]
    assert [by_name[name].placement for name in ("0", "2")] == ["rows", "owned"]
    first = by_name["0"]
    assert (first.param_dtype, first.compute_dtype, first.reduce_dtype) == ("float32", "bfloat16", "float32")


def test_a_model_without_units_is_refused():
    """The error says what is missing, and what to call instead."""
    with pytest.raises(ValueError, match=r"must contain sharded modules .* but Linear has none.*fairshard\.plan"):
        fairshard.summary(nn.Linear(2, 2))


@on_ranks(2)
def test_a_timeline_of_a_block_is_written_by_one_rank(tmp_path):
    """The trace has the events of both ranks; it is written when the block ends."""
    model = fairshard.FSDP(nn.Linear(4, 4))
    path = tmp_path / "step.json"
    with fairshard.timeline(model, path):
        model(torch.ones(2, 4)).sum().backward()
    torch.distributed.barrier()
    if path.exists():
        entries = json.loads(path.read_text())["traceEvents"]
        assert {entry["pid"] for entry in entries} == {0, 1}
    assert path.exists() or torch.distributed.get_rank() > 0
