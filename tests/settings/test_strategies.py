"""Every sharding strategy trains the same model; strategies differ in what is sharded, freed and sent."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import ShardingStrategy as TorchShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from fairshard.nn import FSDP, CPUOffload, MixedPrecision, ShardingStrategy
from fairshard.optim import ShardedGradScaler
from fairshard.utils.collectives import counters, reset_counters
from tests.kit import rank_device
from tests.models import loss_of_tiny, mlp, tiny, tiny_batch, tiny_loss, wrap_each, wrap_tiny
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, randn, rounding, run_steps, sgd

PLAIN = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
plain = pytest.mark.parametrize("strategy", PLAIN, ids=lambda strategy: strategy.name)
MAX_NORM = 0.3


def train(model, accumulate, clip):
    """The losses of a short run."""
    return torch.tensor(run_steps(model, loss_of_tiny, 5, 2 if accumulate else 1, clip=clip))


def clips(clip):
    """How DDP and a wrapper clip, if they do."""
    if not clip:
        return [lambda _: None, lambda _: None]
    return [
        lambda ddp: torch.nn.utils.clip_grad_norm_(ddp.parameters(), MAX_NORM),
        lambda wrapped: wrapped.clip_grad_norm_(MAX_NORM),
    ]


@pytest.mark.pairs
@on_ranks(1, 2, 3)
@plain
@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize(("accumulate", "clip"), [(False, False), (True, True)], ids=["plain", "accumulate-clip"])
def test_a_strategy_trains_as_ddp_does(strategy, flatten, accumulate, clip):
    """Losses and weights equal DDP's: to the bit at 1 and 2 ranks without clipping, otherwise within 1e-6."""
    model = tiny()
    ddp = DistributedDataParallel(copy.deepcopy(model))
    wrapped = wrap_tiny(model, sharding_strategy=strategy, flatten_parameters=flatten)
    expected, losses = (train(m, accumulate, c) for m, c in zip((ddp, wrapped), clips(clip), strict=True))
    rtol = 0.0 if dist.get_world_size() < 3 and not clip and rank_device().type == "cpu" else 1e-6
    torch.testing.assert_close(losses, expected, rtol=rtol, atol=0)
    assert_same_state(wrapped.state_dict(), ddp.module.state_dict(), rtol, rtol)


@on_ranks(in_full(2), 3)
@pytest.mark.parametrize(
    "options",
    [
        {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
        {"mixed_precision": MixedPrecision(torch.bfloat16)},
        {"cpu_offload": CPUOffload(True)},
        {"bucket_cap_mb": 0},
        {"bucket_cap_mb": 1e-3},
    ],
    ids=["bf16-reduce-fp32", "bf16", "offload", "no-buckets", "small-buckets"],
)
def test_strategies_give_the_same_bits(options):
    """In every precision, offloaded or not, in buckets of any size, the losses of all strategies are equal."""
    runs = [train(wrap_tiny(tiny(), sharding_strategy=s, **options), True, clips(True)[1]) for s in PLAIN]
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=0)
    # Without shards the norm is added in another order, and NCCL's replicas add in an order of their own.
    is_in_order = rounding() == (0.0, 0.0)
    torch.testing.assert_close(runs[2], runs[0], rtol=1e-5 if is_in_order else 2**-7, atol=0)


@on_ranks(2, 3)
def test_strategies_give_the_same_bits_without_clipping():
    """Without clipping all strategies give the same bits, because replicas add in rank order, as shards do."""
    runs = [train(wrap_tiny(tiny(), sharding_strategy=s), True, lambda _: None) for s in PLAIN]
    for run in runs[1:]:
        torch.testing.assert_close(run, runs[0], rtol=rounding()[0], atol=rounding()[1])


@on_ranks(2)
def test_no_shard_scales_fp16_gradients():
    """With fp16 and a scaler NO_SHARD steps as FULL_SHARD does, and skips the same steps."""

    def run(strategy):
        model = wrap_tiny(tiny(), sharding_strategy=strategy, mixed_precision=True)
        optimizer, scaler = sgd(model), ShardedGradScaler(init_scale=2.0**18)
        scales = []
        for step in range(4):
            *inputs, targets = tiny_batch(dist.get_rank(), step)
            scaler.scale(tiny_loss(model(*inputs).float(), targets)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return scales, model.state_dict()

    (expected, state), (scales, own) = run(ShardingStrategy.FULL_SHARD), run(ShardingStrategy.NO_SHARD)
    assert scales == expected
    assert scales[-1] < 2.0**18, "some step must have been skipped"
    assert_same_state(own, state)


@on_ranks(2, 3)
def test_what_is_cut_and_what_is_sent():
    """NO_SHARD keeps whole parameters and sends one all-reduce per bucket; the others gather and reduce-scatter."""
    model = mlp(4, 9, 5)
    numel = sum(param.numel() for param in model.parameters())
    seen = {}
    for strategy in PLAIN:
        wrapped = wrap_each(copy.deepcopy(model), sharding_strategy=strategy)
        wrapped(randn(3, 4)).sum().backward()
        reset_counters()
        wrapped(randn(3, 4)).sum().backward()
        seen[strategy.name] = {kind: count for kind, (count, _) in counters().items() if kind != "agreement"}
        own = sum(param.numel() for param in wrapped.parameters())
        assert own == numel if strategy is ShardingStrategy.NO_SHARD else own < numel
        assert (wrapped.rank, wrapped.world_size) == (dist.get_rank(), dist.get_world_size())
        assert wrapped.process_group is dist.group.WORLD
    num_units = sum(1 for part in wrapped.modules() if isinstance(part, FSDP) and part.params)
    assert seen["NO_SHARD"] == {"all_reduce": 1}
    assert seen["SHARD_GRAD_OP"] == {"all_gather": num_units, "reduce_scatter": 1}
    assert seen["FULL_SHARD"] == {"all_gather": 2 * num_units, "reduce_scatter": 1}


@on_ranks(2)
def test_no_sync_keeps_parameters_gathered_under_shard_grad_op():
    """Between the backwards of an accumulation parameters are not gathered again, unless the weights have changed."""
    wrapped = wrap_each(mlp(4, 9, 5), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    optimizer = sgd(wrapped)

    def gathers(context):
        reset_counters()
        with context:
            wrapped(randn(3, 4)).sum().backward()
        return counters().get("all_gather", (0, 0))[0]

    first = gathers(contextlib.nullcontext())
    assert first > 0
    assert [gathers(wrapped.no_sync()) for _ in range(3)] == [first, 0, 0]
    assert gathers(contextlib.nullcontext()) == 0
    optimizer.step()
    assert gathers(wrapped.no_sync()) == first, "a backward that reduces gives the parameters back"
    assert gathers(wrapped.no_sync()) == 0
    with torch.no_grad():
        wrapped.params[0].mul_(2) if wrapped.params else next(wrapped.parameters()).mul_(2)
    assert gathers(wrapped.no_sync()) > 0, "so has the user"


@on_ranks(2)
def test_no_shard_is_written_back_in_any_case():
    """With NO_SHARD writes to whole parameters are kept even without ``writeback``."""
    wrapped = wrap_each(mlp(4, 9), sharding_strategy=ShardingStrategy.NO_SHARD)
    with FSDP.summon_full_params(wrapped, writeback=False), torch.no_grad():
        for param in wrapped.parameters():
            param.fill_(3.0)
    assert all(bool((param == 3).all()) for param in wrapped.parameters())


@on_ranks(2)
def test_strategies_may_be_mixed_in_one_model():
    """An unsharded unit inside a sharded one trains as under DDP, and clipping uses the norm of both."""
    model = tiny()
    ddp = DistributedDataParallel(copy.deepcopy(model))
    model.first = FSDP(model.first, sharding_strategy=ShardingStrategy.NO_SHARD)
    model.second = FSDP(model.second, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    wrapped = FSDP(model)
    expected, losses = (train(m, True, c) for m, c in zip((ddp, wrapped), clips(True), strict=True))
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
    assert_same_state(wrapped.state_dict(), ddp.module.state_dict(), 1e-6, 1e-6)


@on_ranks(2)
def test_torchs_own_names_mean_the_same():
    """The enums of torch.distributed.fsdp are accepted."""
    wrapped = FSDP(mlp(4, 9), sharding_strategy=TorchShardingStrategy.NO_SHARD)
    assert wrapped.sharding_strategy is ShardingStrategy.NO_SHARD
