"""The units, buckets and memory that `describe` predicts are those of a run."""

import functools
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from fairshard.cli.gpt import GPT, Block, GPTConfig
from fairshard.nn import FSDP, MixedPrecision, ShardingStrategy, fully_shard
from fairshard.nn.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    describe,
    size_based_auto_wrap_policy,
)
from fairshard.planning.summary import unit_table
from fairshard.utils.collectives import counters, reset_counters
from tests.kit import fake_group, rank_device
from tests.models import Block as TinyBlock
from tests.models import mlp, tiny
from tests.on_ranks import on_ranks

BLOCKS = ModuleWrapPolicy({Block})
BF16 = {"mixed_precision": True, "compute_dtype": torch.bfloat16}
BY_SIZE = functools.partial(size_based_auto_wrap_policy, min_num_params=100_000)
SIZES = GPTConfig(layers=4, dim=256, heads=4, context=16)


def gpt(device="cpu", frozen=False):
    """3.1 million parameters in blocks and 0.1 million around them; ``frozen`` freezes the embeddings."""
    with torch.device(device):
        model = GPT(SIZES)
    if frozen:
        model.byte_embedding.requires_grad_(False)
        model.blocks[0].attention.requires_grad_(False)
    return model


def train(model, optimizer, num_steps):
    """Steps on sequences of two bytes, whose activations are negligible beside the weights."""
    for _ in range(num_steps):
        tokens = torch.randint(256, (1, 2))
        model(tokens).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def peak_of(prof, since):
    """The most bytes that torch's CPU allocator had allocated at the same time after ``since``."""
    events = []
    waiting = list(prof.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag.name == "Allocation":
            events.append((event.start_time_ns, event.extra_fields.alloc_size))
    live = peak = 0
    for moment, nbytes in sorted(events):
        live += nbytes
        if moment >= since:
            peak = max(peak, live)
    return peak


OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, fused=True),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, fused=True),
    "sgd-momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
}


def full(*values):
    """A case that ``make test-all`` runs."""
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.cpu_only("measures the memory of the CPU")
@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "policy", "optimizer", "frozen", "kwargs"),
    [
        (2, BLOCKS, "adamw", False, {}),
        (2, BLOCKS, "sgd", False, {"bucket_cap_mb": 1}),
        (2, BLOCKS, "sgd", False, {"reshard_after_forward": False, "bucket_cap_mb": 0}),
        (2, BLOCKS, "sgd", False, {**BF16, "bucket_cap_mb": 0}),
        (2, BLOCKS, "adamw", True, {"cpu_offload": True}),
        (2, BLOCKS, "sgd", False, {"sharding_strategy": ShardingStrategy.NO_SHARD, "bucket_cap_mb": 1}),
        full(2, BLOCKS, "adamw", False, {"sharding_strategy": ShardingStrategy.NO_SHARD}),
        full(2, BLOCKS, "adamw", False, {"sharding_strategy": ShardingStrategy.NO_SHARD, **BF16}),
        full(3, BLOCKS, "sgd", True, {"sharding_strategy": ShardingStrategy.NO_SHARD, "bucket_cap_mb": 0}),
        full(1, BLOCKS, "sgd", False, {"sharding_strategy": ShardingStrategy.NO_SHARD}),
        full(4, BLOCKS, "sgd", False, {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "bucket_cap_mb": 0}),
        full(4, BLOCKS, "adamw", False, {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "cpu_offload": True}),
        full(4, BLOCKS, "sgd", False, {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, **BF16}),
        full(4, BLOCKS, "sgd", False, {"sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2, "bucket_cap_mb": 1}),
        full(4, BLOCKS, "sgd", False, {"reshard_after_forward": 2, "bucket_cap_mb": 0}),
        full(4, BLOCKS, "adamw", False, {"reshard_after_forward": 2, **BF16}),
        full(4, BLOCKS, "sgd", False, {"reshard_after_forward": 4, "bucket_cap_mb": 1}),
        full(1, BLOCKS, "adamw", False, {}),
        full(1, BLOCKS, "sgd", False, BF16),
        full(2, None, "adamw", False, {}),
        full(2, BLOCKS, "adamw", False, BF16),
        full(2, BLOCKS, "sgd", False, {"bucket_cap_mb": 0}),
        full(2, BLOCKS, "sgd", False, {**BF16, "fp32_reduce_scatter": True}),
        full(2, BLOCKS, "sgd-momentum", False, {"move_grads_to_cpu": True, "bucket_cap_mb": 0}),
        full(2, BLOCKS, "sgd-momentum", True, {"flatten_parameters": False, "bucket_cap_mb": 0}),
        full(2, BY_SIZE, "sgd", False, {"bucket_cap_mb": 1}),
        full(2, always_wrap_policy, "sgd", False, {"bucket_cap_mb": 0}),
        full(3, BLOCKS, "adamw", False, {}),
        full(3, BLOCKS, "sgd", False, {**BF16, "bucket_cap_mb": 0}),
    ],
)
def test_the_predicted_peak_is_what_is_measured(policy, optimizer, frozen, kwargs):
    """The predicted peak is within 10 % of the measured one, from the second step on; hybrid runs have two replicas."""
    world_size, hybrid = dist.get_world_size(), {}
    if getattr(kwargs.get("sharding_strategy"), "is_hybrid", False):
        world_size //= 2
        hybrid = {"device_mesh": init_device_mesh("cpu", (2, world_size))}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        model = FSDP(gpt(frozen=frozen), auto_wrap_policy=policy, **kwargs, **hybrid)
        steps = OPTIMIZERS[optimizer](model.parameters())
        train(model, steps, 1)
        since = time.time_ns()
        train(model, steps, 1)
    how = {"optimizer": optimizer, "device": "cpu", "num_replicas": 2 if hybrid else None}
    plan = describe(gpt("meta", frozen), policy, world_size, **how, **kwargs)
    assert plan.peak_nbytes == pytest.approx(peak_of(prof, since), rel=0.1), str(plan)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        BF16,
        {"flatten_parameters": False},
        {"mixed_precision": MixedPrecision(torch.bfloat16)},
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
    ],
)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.filterwarnings("ignore:`auto_wrap_policy`")
def test_the_units_are_those_that_wrapping_makes(kwargs, frozen, world_size):
    """The table of a plan, made without a group on the meta device, equals that of the wrapped model."""
    loose = {"flatten_parameters": False}
    policy = CustomPolicy(lambda m: loose if isinstance(m, Block) else isinstance(m, nn.Embedding))
    plan = describe(gpt("meta", frozen), policy, world_size, **kwargs)
    with fake_group(world_size):
        assert list(plan.units) == unit_table(FSDP(gpt(frozen=frozen), auto_wrap_policy=policy, **kwargs))


@on_ranks(2)
@pytest.mark.parametrize("cap", [0, 0.5, 4, 25])
def test_the_buckets_are_those_that_are_sent(cap):
    """A step sends one reduce-scatter per bucket of the plan, with the same bytes; half of the bytes stay local."""
    model = FSDP(gpt().to(rank_device()), auto_wrap_policy=BLOCKS, bucket_cap_mb=cap)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    train(model, optimizer, 1)
    reset_counters()
    train(model, optimizer, 1)
    buckets = describe(gpt("meta"), BLOCKS, dist.get_world_size(), bucket_cap_mb=cap).buckets
    assert counters()["reduce_scatter"] == (len(buckets), sum(bucket.nbytes for bucket in buckets) // 2)
    names = [name for bucket in buckets for name in bucket.units]
    assert names == [f"blocks.{index}" for index in reversed(range(SIZES.layers))] + [""]


def test_every_term_by_hand():
    """Two Linears of 20 parameters on two ranks, each its own bucket: 10 parameters a shard, 80 bytes gathered.

    The peak is where the first Linear has computed its gradients: it is gathered, they are whole in its leaves, and
    the bucket of the last one is on its way, with half as much that is received.
    """
    plan = describe(mlp(4, 4, 4), ModuleWrapPolicy({nn.Linear}), 2, device="cpu", bucket_cap_mb=0)
    assert {term.name: term.nbytes for term in plan.terms} == {
        "shards": 2 * 10 * 4,
        "optimizer state": 2 * (2 * 10 * 4 + 4),  # two moments, and the number of steps
        "gathered units": 20 * 4,
        "whole gradients": 20 * 4,
        "buckets": 20 * 4 + 10 * 4,
    }
    assert plan.peak_at == "in the backward of 0"
    assert plan.peak_nbytes == sum(term.nbytes for term in plan.terms)
    assert [bucket.nbytes for bucket in plan.buckets] == [80, 80]


def test_what_offload_keeps_in_host_memory_is_told_apart():
    """On a GPU the shards, moments and gradients of an offloaded model do not count to the device's peak."""
    kept = describe(gpt("meta"), BLOCKS, 4, device="cuda")
    moved = describe(gpt("meta"), BLOCKS, 4, device="cuda", cpu_offload=True)
    shards = sum(row.shard_nbytes for row in moved.units)
    assert {term.name: term.nbytes // shards for term in moved.terms if term.on_host} == {
        "shards": 1,
        "optimizer state": 2,
        "gradients": 1,
    }
    assert moved.host_nbytes == sum(term.nbytes for term in moved.terms if term.on_host)
    assert moved.peak_nbytes <= kept.peak_nbytes - 3 * shards
    assert kept.host_nbytes == 0
    assert describe(gpt("meta"), BLOCKS, 4, device="cpu", cpu_offload=True).host_nbytes == 0


def test_nothing_is_changed_by_a_plan():
    """A plan does not change the module's parameters, hooks or children, and needs no group."""
    model = tiny()
    before = dict(model.named_parameters())
    described = {name: dict(vars(module)) for name, module in model.named_modules()}
    with pytest.warns(UserWarning, match="`embed`, `head` share one"):
        describe(model, always_wrap_policy, 2)
    assert all(param is before[name] for name, param in model.named_parameters())
    assert {name: vars(module) for name, module in model.named_modules()} == described


def test_a_module_that_runs_in_two_places_is_counted_twice_in_time_and_once_in_space():
    """A module that runs twice is one unit, and its gradients are sent once, after the backward of its first call."""
    shared = nn.Linear(8, 8, bias=False)
    model = nn.Sequential(shared, nn.Linear(8, 8, bias=False), shared)
    plan = describe(model, ModuleWrapPolicy({nn.Linear}), 2, bucket_cap_mb=0)
    assert [row.fqn for row in plan.units] == ["", "0", "1"]
    assert [bucket.units for bucket in plan.buckets] == [("1",), ("0",)]


@pytest.mark.parametrize("name", ["ignored_modules", "ignored_states", "ignored_parameters"])
def test_what_is_ignored_is_not_counted(name):
    """Modules and parameters that any of the wrapper's arguments ignores are not counted."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    ignored = model[0].weight if name == "ignored_parameters" else model[0]
    plan = describe(model, ModuleWrapPolicy({nn.Linear}), 2, **{name: [ignored]})
    assert sum(row.numel for row in plan.units) == 64


def test_a_large_model_takes_no_memory():
    """A hundred billion parameters on the meta device are planned in a moment."""
    model = nn.Sequential(*(nn.Linear(2**15, 2**15, bias=False, device="meta") for _ in range(100)))
    plan = describe(model, ModuleWrapPolicy({nn.Linear}), 1024, **BF16, device="cuda")
    assert sum(row.numel for row in plan.units) == 100 * 2**30
    assert {term.name: term.nbytes for term in plan.terms}["gathered units"] == 2 * 2**30 * 2
    text = str(plan)
    assert "107,374,182,400" in text
    assert "without activations" in text


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"optimizer": "lion"}, ValueError, "`optimizer` must be one of adamw, adam, sgd, sgd-momentum"),
        ({"device": "tpu"}, ValueError, "`device` must be a type of device"),
        ({"world_size": 0}, ValueError, "`world_size` must be at least 1"),
        ({"sharding_strategy": ShardingStrategy.HYBRID_SHARD}, ValueError, "is None and unit `root` has HYB"),
        ({"num_replicas": 2}, ValueError, "is 2 and unit `root` has FULL_SHARD"),
        ({"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "num_replicas": 0}, ValueError, "must be at least 1"),
        ({"reshard_after_forward": 3}, ValueError, "must divide the number of ranks, 2, but is 3 for unit `root`"),
        ({"compute_type": torch.bfloat16}, TypeError, "compute_type"),
        ({"fp32_reduce_scatter": True}, ValueError, "needs `mixed_precision=True`"),
    ],
)
def test_what_cannot_be_planned_for_is_refused(kwargs, error, match):
    """Invalid arguments raise by name, as the wrapper refuses its own."""
    with pytest.raises(error, match=match):
        describe(tiny(), ModuleWrapPolicy({TinyBlock}), **{"world_size": 2, **kwargs})


@pytest.mark.parametrize("door", [FSDP, fully_shard])
def test_a_sharded_module_is_refused(door):
    """A module with units of the wrapper or of ``fully_shard`` raises; ``unit_table`` gives its table."""
    with fake_group(2):
        sharded = nn.Sequential(door(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="`0` is wrapped already"):
        describe(sharded, None, 2)
