"""Shards in one group of ranks, replicas of them in another: the mean is over both."""

import copy
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fairshard.errors import MixedGroupsError, RanksDisagreeError
from fairshard.nn import FSDP, MixedPrecision, ShardingStrategy
from fairshard.utils.collectives import counters, reset_counters
from tests.kit import rank_device
from tests.models import mlp, tiny, tiny_batch, tiny_loss, wrap_each, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, mean_over_ranks, randn, sgd

HYBRID, ZERO2 = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2


def pairs(num_shards):
    """This rank's groups: ``num_shards`` consecutive ranks, and the ranks at the same place in each such group."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = []
    starts = range(0, world_size, num_shards)
    for ranks in [list(range(start, start + num_shards)) for start in starts]:
        group = dist.new_group(ranks)
        found += [group] if rank in ranks else []
    for ranks in [list(range(first, world_size, num_shards)) for first in range(num_shards)]:
        group = dist.new_group(ranks)
        found += [group] if rank in ranks else []
    return tuple(found)


@pytest.mark.pairs
@on_ranks(4)
@pytest.mark.parametrize("strategy", [HYBRID, ZERO2], ids=lambda strategy: strategy.name)
@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize("bucket_cap_mb", [25, 0])
def test_hybrid_takes_the_mean_over_shards_and_replicas(strategy, num_shards, bucket_cap_mb):
    """Weights equal those of a plain replica that adds in the same order, to the bit."""
    plain = tiny()
    wrapped = wrap_tiny(
        copy.deepcopy(plain), process_group=pairs(num_shards), sharding_strategy=strategy, bucket_cap_mb=bucket_cap_mb
    )
    of_plain, of_wrapped = sgd(plain), sgd(wrapped)
    for step in range(3):
        for micro in range(2):
            *inputs, targets = tiny_batch(dist.get_rank(), step, micro)
            tiny_loss(plain(*inputs), targets).backward()
            if micro:
                tiny_loss(wrapped(*inputs), targets).backward()
            else:
                with wrapped.no_sync():
                    tiny_loss(wrapped(*inputs), targets).backward()
        for param in plain.parameters():
            param.grad = mean_over_ranks(param.grad, num_shards=num_shards)
        for optimizer in (of_plain, of_wrapped):
            optimizer.step()
            optimizer.zero_grad()
    rtol = 0.0 if rank_device().type == "cpu" else 1e-6
    assert_same_state(wrapped.state_dict(), plain.state_dict(), rtol, rtol)


@on_ranks(4)
def test_hybrid_clips_by_the_norm_of_the_whole_gradient():
    """Each shard counts once, not once per replica."""
    wrapped = wrap_each(mlp(4, 9, 5), process_group=pairs(2), sharding_strategy=HYBRID)
    wrapped(randn(3, 4)).square().sum().backward()
    with FSDP.summon_full_params(wrapped, with_grads=True):
        expected = torch.linalg.vector_norm(torch.cat([param.grad.flatten() for param in wrapped.parameters()]))
    torch.testing.assert_close(wrapped.clip_grad_norm_(1e9), expected, rtol=1e-6, atol=0)


@pytest.mark.cpu_only("collectives of devices add bf16 and fp16 as they are; ours on gloo in fp32")
@on_ranks(4)
@pytest.mark.parametrize("mixed", [MixedPrecision(torch.bfloat16), MixedPrecision(torch.float16)], ids=["bf16", "fp16"])
def test_low_precision_sums_are_wide(mixed):
    """Shards of bf16 and fp16 gradients are summed over replicas in fp32: equal to FULL_SHARD within fp32's error."""
    states = []
    for kwargs in ({"process_group": pairs(2), "sharding_strategy": HYBRID}, {}):
        wrapped = wrap_tiny(tiny(), mixed_precision=mixed, **kwargs)
        optimizer = sgd(wrapped)
        *inputs, targets = tiny_batch(dist.get_rank())
        tiny_loss(wrapped(*inputs), targets).backward()
        optimizer.step()
        states.append(wrapped.state_dict())
    assert_same_state(states[0], states[1], 1e-6, 1e-6)


@on_ranks(4)
def test_a_mesh_and_nodes_give_the_same_groups():
    """A 2-D mesh (replicas, shards) and node boundaries give the same groups as a pair of groups."""
    mesh = init_device_mesh(rank_device().type, (2, 2))
    by_mesh = FSDP(mlp(4, 9), device_mesh=mesh, sharding_strategy=HYBRID)
    assert by_mesh.world_size == 2
    first = dist.get_rank() // 2 * 2
    assert dist.get_process_group_ranks(by_mesh.process_group) == [first, first + 1]
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        by_node = [FSDP(mlp(4, 9), sharding_strategy=HYBRID) for _ in range(2)]
    assert by_node[0].process_group is by_node[1].process_group
    assert dist.get_process_group_ranks(by_node[0].process_group) == dist.get_process_group_ranks(by_mesh.process_group)
    for wrapped in (by_mesh, *by_node):
        assert wrapped.params[0].numel() == (4 * 9 + 9 + 1) // 2


@on_ranks(4)
def test_replicas_share_the_buckets():
    """All units together need one reduce-scatter, and one all-reduce of its shard."""
    wrapped = wrap_each(mlp(4, 9, 5), process_group=pairs(2), sharding_strategy=HYBRID)
    for _ in range(2):
        reset_counters()
        wrapped(randn(3, 4)).sum().backward()
    nbytes = sum(param.nbytes for param in wrapped.parameters())
    assert counters()["reduce_scatter"] == (1, nbytes)
    assert counters()["all_reduce"] == (1, nbytes)


@on_ranks(4)
def test_state_dicts_of_hybrid_models_are_whole():
    """Every rank sees the plain model's state, and loads it."""
    plain = tiny()
    wrapped = wrap_tiny(copy.deepcopy(plain), process_group=pairs(2), sharding_strategy=HYBRID)
    assert_same_state(wrapped.state_dict(), plain.state_dict())
    other = tiny(seed=5)
    wrapped.load_state_dict(other.state_dict())
    assert_same_state(wrapped.state_dict(), other.state_dict())


@on_ranks(4)
def test_wrong_groups_are_named():
    """Groups that do not fit hybrid sharding, or not those of other units or ranks, raise."""
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="3"), pytest.raises(ValueError, match="spread evenly"):
        FSDP(mlp(4, 9), sharding_strategy=HYBRID)
    others = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]  # ranks 0 and 3 hold different pieces
    crossed = (pairs(2)[0], others[dist.get_rank() in (1, 2)])
    with pytest.raises(RanksDisagreeError, match=r"rank [01] has piece (\d) of 2 of.* has piece (?!\1)\d of 2"):
        FSDP(mlp(4, 9), crossed, sharding_strategy=HYBRID)(randn(3, 4))
    first, second = pairs(2), pairs(2)
    model = mlp(4, 9, 5)
    model[0] = FSDP(model[0], first, sharding_strategy=HYBRID)
    with pytest.raises(ValueError, match=r"must share its pair of groups, but those of `0` have the ranks .* `root`"):
        FSDP(model, second, sharding_strategy=HYBRID)(randn(3, 4))


@on_ranks(4)
def test_clipping_over_a_part_of_the_ranks_is_refused():
    """Clipping raises if a unit is averaged over fewer ranks, because it has another norm."""
    group = pairs(2)[0]
    model = mlp(4, 9, 5)
    model[0] = FSDP(model[0], group)
    wrapped = FSDP(model)
    wrapped(randn(3, 4)).sum().backward()
    with pytest.raises(MixedGroupsError, match="has another one than the root"):
        wrapped.clip_grad_norm_(1.0)
