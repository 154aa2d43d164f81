"""The public bucketer: which inputs wait, which are sent immediately, and that every sum is right."""

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fairshard.utils.collectives import counters, reset_counters
from fairshard.utils.reduce_scatter_bucketer import ReduceScatterBucketer
from tests.kit import rank_device
from tests.on_ranks import on_ranks

MB = 1024 * 1024


def inputs(numel, dtype=torch.float32):
    """One tensor per rank: ones, but zeros for this rank itself."""
    tensors = [torch.ones(numel, device=rank_device(), dtype=dtype) for _ in range(dist.get_world_size())]
    tensors[dist.get_rank()].zero_()
    return tensors


def numel_of(nbytes):
    """Number of fp32 elements in each input so that all inputs together have ``nbytes``."""
    return nbytes // 4 // dist.get_world_size()


def sent():
    """Number of reduce-scatters since the counters were reset."""
    return counters().get("reduce_scatter", (0, 0))[0]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("bucket_cap_mb", [0, 0.25, 1])
@pytest.mark.parametrize("numel", [1, 7, 70_000])
def test_the_callback_gets_the_sum(bucket_cap_mb, numel):
    """The callback gets the sum, here the number of other ranks, as its only argument."""
    bucketer = ReduceScatterBucketer(bucket_cap_mb=bucket_cap_mb)
    callback = mock.Mock()
    bucketer.reduce_scatter_async(inputs(numel), dist.group.WORLD, callback_fn=callback)
    bucketer.flush()
    ((reduced,), no_kwargs) = callback.call_args
    assert no_kwargs == {}
    assert callback.call_count == 1
    assert reduced.shape == (numel,)
    assert torch.equal(reduced, torch.full_like(reduced, dist.get_world_size() - 1))


@on_ranks(2, 4)
def test_small_ones_wait_for_flush():
    """Below the cap nothing is sent until `flush`, which sends all inputs together."""
    bucketer = ReduceScatterBucketer(bucket_cap_mb=1)
    callbacks = [mock.Mock() for _ in range(5)]
    reset_counters()
    for size, callback in enumerate(callbacks, start=1):
        bucketer.reduce_scatter_async(inputs(size), dist.group.WORLD, callback)
    assert sent() == 0
    assert all(callback.call_count == 0 for callback in callbacks)
    bucketer.flush()
    assert sent() == 1
    for size, callback in enumerate(callbacks, start=1):
        assert callback.call_count == 1
        assert torch.equal(callback.call_args[0][0], torch.full((size,), dist.get_world_size() - 1.0))


@on_ranks(2)
def test_a_full_bucket_is_sent_and_a_new_one_opened():
    """An input that does not fit goes into the next bucket; the callbacks of the full bucket have then run."""
    bucketer = ReduceScatterBucketer(bucket_cap_mb=1)
    first, second, third = mock.Mock(), mock.Mock(), mock.Mock()
    numel = numel_of(MB * 2 // 5)
    bucketer.reduce_scatter_async(inputs(numel), dist.group.WORLD, first)
    bucketer.reduce_scatter_async(inputs(numel), dist.group.WORLD, second)
    assert first.call_count == second.call_count == 0
    bucketer.reduce_scatter_async(inputs(numel), dist.group.WORLD, third)
    assert (first.call_count, second.call_count, third.call_count) == (1, 1, 0)
    bucketer.flush()
    assert third.call_count == 1


@on_ranks(2)
def test_one_over_the_cap_overtakes_those_that_wait():
    """An input over the cap is sent immediately; small inputs before and after it still wait."""
    bucketer = ReduceScatterBucketer(bucket_cap_mb=0.25)
    small, large, last = mock.Mock(), mock.Mock(), mock.Mock()
    bucketer.reduce_scatter_async(inputs(1), dist.group.WORLD, small)
    bucketer.reduce_scatter_async(inputs(numel_of(MB)), dist.group.WORLD, large)
    bucketer.reduce_scatter_async(inputs(2), dist.group.WORLD, last)
    assert (small.call_count, large.call_count, last.call_count) == (0, 1, 0)
    bucketer.flush()
    assert (small.call_count, large.call_count, last.call_count) == (1, 1, 1)


@on_ranks(2)
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_the_cap_counts_the_inputs_of_all_ranks(over):
    """An input waits only if its bytes for all ranks together are below the cap; at the cap it is sent."""
    bucketer = ReduceScatterBucketer(bucket_cap_mb=0.25)
    callback = mock.Mock()
    bucketer.reduce_scatter_async(inputs(numel_of(MB // 4) + over), dist.group.WORLD, callback)
    assert callback.call_count == (0 if over < 0 else 1)
    bucketer.flush()
    assert callback.call_count == 1


@on_ranks(2)
@pytest.mark.parametrize("bucket_cap_mb", [0, -1])
def test_no_cap_disables_bucketing(bucket_cap_mb):
    """With a cap of 0 or less each input is sent on its own, immediately."""
    bucketer = ReduceScatterBucketer(bucket_cap_mb=bucket_cap_mb)
    reset_counters()
    for number in range(1, 4):
        callback = mock.Mock()
        bucketer.reduce_scatter_async(inputs(1), dist.group.WORLD, callback)
        assert callback.call_count == 1
        assert sent() == number


@on_ranks(2)
def test_dtypes_and_groups_do_not_share_a_bucket():
    """Inputs of another dtype, or for another group, wait in a bucket of their own."""
    bucketer = ReduceScatterBucketer(bucket_cap_mb=1)
    other = dist.new_group()
    callbacks = [mock.Mock() for _ in range(4)]
    bucketer.reduce_scatter_async(inputs(3), dist.group.WORLD, callbacks[0])
    bucketer.reduce_scatter_async(inputs(3, torch.bfloat16), dist.group.WORLD, callbacks[1])
    bucketer.reduce_scatter_async(inputs(3), other, callbacks[2])
    bucketer.reduce_scatter_async(inputs(2), dist.group.WORLD, callbacks[3])
    reset_counters()
    bucketer.flush()
    assert sent() == 3
    assert [callback.call_args[0][0].dtype for callback in callbacks] == [
        torch.float32,
        torch.bfloat16,
        torch.float32,
        torch.float32,
    ]
    for callback in callbacks:
        assert callback.call_args[0][0].unique().tolist() == [dist.get_world_size() - 1]


@on_ranks(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_do_not_depend_on_what_shares_the_bucket(dtype):
    """Random values give the sum in rank order, to the bit, alone or together with others."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    given = [
        [torch.randn(5, generator=torch.Generator().manual_seed(10 * r + c), device="cpu") for c in range(world_size)]
        for r in range(world_size)
    ]
    given = [[values.to(dtype) for values in row] for row in given]
    wide = functools.reduce(torch.add, [given[r][rank].float() for r in range(world_size)])
    results = []
    for cap in (0, 1):
        bucketer = ReduceScatterBucketer(bucket_cap_mb=cap)
        bucketer.reduce_scatter_async(inputs(3, dtype), dist.group.WORLD)
        bucketer.reduce_scatter_async([t.to(rank_device()) for t in given[rank]], dist.group.WORLD, results.append)
        bucketer.reduce_scatter_async(inputs(4, dtype), dist.group.WORLD)
        bucketer.flush()
    assert torch.equal(results[0], results[1])
    if rank_device().type == "cpu":
        assert torch.equal(results[0], wide.to(dtype))


@on_ranks(2)
def test_shape_is_kept_and_inputs_are_not_changed():
    """The reduced tensor has the shape of one input; the inputs are not changed."""
    tensors = [torch.ones(2, 3, device=rank_device()) for _ in range(2)]
    seen = []
    bucketer = ReduceScatterBucketer(bucket_cap_mb=1)
    bucketer.reduce_scatter_async(tensors, dist.group.WORLD, lambda reduced: seen.append(reduced.shape))
    bucketer.flush()
    assert seen == [(2, 3)]
    assert all(tensor.eq(1).all() for tensor in tensors)


@on_ranks(2)
def test_memory_handed_to_the_callback_is_kept():
    """What a callback keeps is not changed by later buckets."""
    bucketer = ReduceScatterBucketer(bucket_cap_mb=1)
    kept = []
    for factor in (1, 2):
        bucketer.reduce_scatter_async([factor * t for t in inputs(4)], dist.group.WORLD, kept.append)
        bucketer.flush()
    assert [tensor.unique().item() for tensor in kept] == [1, 2]


@on_ranks(2)
def test_one_input_per_rank_of_equal_size():
    """Too few inputs, or inputs of different sizes, are refused before anything is sent."""
    bucketer = ReduceScatterBucketer(bucket_cap_mb=1)
    with pytest.raises(ValueError, match="1 for 2 ranks"):
        bucketer.reduce_scatter_async(inputs(4)[:1], dist.group.WORLD)
    with pytest.raises(ValueError, match="same number of elements"):
        bucketer.reduce_scatter_async([torch.ones(1), torch.ones(2)], dist.group.WORLD)
    reset_counters()
    bucketer.flush()
    assert sent() == 0
