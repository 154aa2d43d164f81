"""A gradient is written once, and an all-gather is copied into but never out of, by count of torch's operators."""

import copy
import itertools
from unittest.mock import patch

import pytest
import torch

from fairshard.utils import buckets
from tests.kit import CopyCounter
from tests.models import mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import randn, sgd

pytestmark = pytest.mark.behaviour("copies of memory")

WIDTHS = (6, 11, 7, 5)
SIZES = [before * after + after for before, after in itertools.pairwise(WIDTHS)]
FP32, BF16 = 4, 2


def copies_of_a_step(model, max_staged=0):
    """The copies of the fourth step: the order is known, buckets are planned, and no values of shards are compared."""
    optimizer = sgd(model)
    for step in range(4):
        with CopyCounter() as copies, patch.object(buckets, "MAX_STAGED_NBYTES", max_staged):
            model(randn(4, WIDTHS[0], key=step)).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
    return copies


def shard_sizes(world_size):
    return [-(-size // world_size) for size in SIZES]


@pytest.mark.pairs
@pytest.mark.cpu_only("counts the writes of gloo's calls, which other collectives do not make")
@on_ranks(2, 3)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("bucket", [0, 0.0005, 25])
def test_one_write_per_gradient_and_none_per_gather(reshard, bucket):
    """In fp32 a step writes: every gradient once; for every gather this rank's own row; nothing else."""
    world_size = torch.distributed.get_world_size()
    plain = copies_of_a_step(mlp(*WIDTHS))
    copies = copies_of_a_step(wrap_each(mlp(*WIDTHS), reshard_after_forward=reshard, bucket_cap_mb=bucket))
    num_gathers = 2 if reshard else 1  # before the forward, and again before the backward
    assert plain.total_nbytes() == 0, "this model must not copy by itself"
    assert copies.nbytes == {
        "_foreach_copy_": FP32 * sum(SIZES),
        "copy_": FP32 * num_gathers * sum(shard_sizes(world_size)),
        "cat": 0,
        "clone": 0,
        "_to_copy": 0,
    }
    assert copies.counts["_foreach_copy_"] == len(SIZES), "one call for all gradients of a unit"


@pytest.mark.cpu_only("on an accelerator one kernel writes many runs")
@on_ranks(3)
def test_small_gradients_are_written_end_to_end_and_copied_to_their_columns_at_once():
    """In a bucket of several units, each of which would fill many runs of it."""
    written_once = copies_of_a_step(wrap_each(mlp(*WIDTHS)))
    copies = copies_of_a_step(wrap_each(mlp(*WIDTHS)), max_staged=FP32 * 3 * max(shard_sizes(3)))
    assert copies.nbytes["_foreach_copy_"] == written_once.nbytes["_foreach_copy_"]
    assert copies.nbytes["copy_"] - written_once.nbytes["copy_"] == FP32 * 3 * sum(shard_sizes(3))
    assert copies.counts["copy_"] - written_once.counts["copy_"] == len(SIZES)


@pytest.mark.cpu_only("counts the writes of gloo's calls, which other collectives do not make")
@on_ranks(2)
def test_writes_of_unflattened_parameters():
    """Without flattening, the bytes follow the same formula, parameter by parameter."""
    model = mlp(*WIDTHS)
    params = [param.numel() for param in model.parameters()]
    copies = copies_of_a_step(wrap_each(model, flatten_parameters=False))
    assert copies.nbytes["_foreach_copy_"] == FP32 * sum(params)
    assert copies.nbytes["copy_"] == FP32 * 2 * sum(-(-numel // 2) for numel in params)
    assert copies.nbytes["cat"] == copies.nbytes["clone"] == copies.nbytes["_to_copy"] == 0


@pytest.mark.cpu_only("counts the writes of gloo's calls, which other collectives do not make")
@on_ranks(2)
@pytest.mark.parametrize("fp32_reduce", [True, False])
def test_writes_under_mixed_precision(fp32_reduce):
    """The copy into the gather also casts to the compute dtype, the copy into the bucket to the reduce dtype."""
    model = wrap_each(mlp(*WIDTHS), mixed_precision=True, compute_dtype=torch.bfloat16, fp32_reduce_scatter=fp32_reduce)
    copies = copies_of_a_step(model)
    shards = sum(shard_sizes(2))
    assert copies.nbytes["_foreach_copy_"] == (FP32 if fp32_reduce else BF16) * sum(SIZES)
    assert copies.nbytes["copy_"] == BF16 * 2 * shards
    assert copies.nbytes["cat"] == copies.nbytes["clone"] == 0
    # The input is cast once. A sum of bf16 starts by widening the first rank's row; the bucket holds all units.
    widened = 0 if fp32_reduce else FP32 * shards
    assert copies.nbytes["_to_copy"] == BF16 * 4 * WIDTHS[0] + widened


@pytest.mark.cpu_only("counts the writes of gloo's calls, which other collectives do not make")
@on_ranks(1)
def test_alone_nothing_is_copied_for_the_gather():
    """With one rank and one dtype, the module computes on the shard itself."""
    model = mlp(*WIDTHS)
    weights = [param.detach().clone() for param in copy.deepcopy(model).parameters()]
    copies = copies_of_a_step(wrap_each(model))
    assert copies.nbytes["copy_"] == copies.nbytes["cat"] == copies.nbytes["clone"] == 0
    assert copies.nbytes["_foreach_copy_"] == FP32 * sum(weight.numel() for weight in weights)
