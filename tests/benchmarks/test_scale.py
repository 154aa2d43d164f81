"""Scale on paper: the arithmetic of messages, operations and step times."""

import math
from collections import Counter
from dataclasses import replace

import models
import pytest
import scale
import torch
from scaling import host
from scaling.machines import MACHINES, PUBLISHED
from scaling.shapes import SHAPES, LlamaConfig, Shape, llama
from scaling.step_time import (
    ADAMW_NBYTES,
    HostTime,
    agreement_seconds,
    block_seconds,
    message_seconds,
    step_time,
)
from scaling.traffic import GATHER, REDUCE, REPLICAS, Message, Ranks, plan_of, traffic_of
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import ShardingStrategy
from fairshard.nn.wrap import ModuleWrapPolicy
from tests.kit import CollectiveCounter, fake_group

GPT = Shape("gpt", models.GPTConfig(3, 128, vocab=50, batch=2, context=8), 2, 64, 2, 8, fused=False)
MOE = llama("moe", LlamaConfig(3, 64, 2, 1, 96, 50, head_dim=32, num_experts=4, num_active=2), batch=2, context=8)
NO_HOST = HostTime(0.0)
KINDS = {
    **dict.fromkeys(("all_gather_single", "_allgather_base"), GATHER),
    **dict.fromkeys(("reduce_scatter_single", "_reduce_scatter_base"), REDUCE),
    "allreduce": REPLICAS,
}


def real(shape):
    """The model of ``shape`` in memory."""
    torch.manual_seed(0)
    kind = models.GPT if isinstance(shape.config, models.GPTConfig) else type(shape.build())
    return kind(shape.config)


def lossless(name="H100", **given):
    """A machine whose collectives take no time but that of their bytes, and whose host takes none."""
    free = dict.fromkeys(("base_latency", "link_hop", "network_hop", "launch", "host_hop"), 0.0)
    return replace(MACHINES[name], **{**free, "host_network": math.inf, **given})


def figured(shape, ranks, machine, host_time=NO_HOST):
    """The traffic and the time of a step."""
    traffic = traffic_of(plan_of(shape.build(), shape.block, ranks), ranks)
    return traffic, step_time(shape, traffic, machine, ranks, host_time)


@pytest.mark.cpu_only("counts calls of a fake group")
@pytest.mark.parametrize("ranks", [Ranks(2), Ranks(6), Ranks(64), Ranks(2, 4)], ids=str)
@pytest.mark.parametrize(("shape", "cap", "num_buckets"), [(GPT, 25, 1), (GPT, 0.1, 4), (MOE, 0.4, 2)])
def test_the_messages_are_those_that_a_step_issues(shape, cap, num_buckets, ranks):
    """Kinds, number and bytes of the messages are what an independent counter sees in a step of the engine."""
    settings = {"bucket_cap_mb": cap}
    with fake_group(ranks.world_size):
        if ranks.is_hybrid:
            mesh = init_device_mesh("cpu", (ranks.num_replicas, ranks.num_shards))
            settings |= {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
        policy = ModuleWrapPolicy({shape.block})
        bf16 = {"mixed_precision": True, "compute_dtype": torch.bfloat16}
        tokens = torch.zeros(2, 8, dtype=torch.long)
        with CollectiveCounter() as counter:
            model = FSDP(real(shape), auto_wrap_policy=policy, **bf16, **settings)
            model(tokens).float().sum().backward()  # records the order
            counter.calls.clear()
            model(tokens).float().sum().backward()
    issued = Counter((KINDS[name], nbytes) for name, nbytes in counter.calls)
    traffic = traffic_of(plan_of(shape.build(), shape.block, ranks, bucket_cap_mb=cap), ranks)
    assert issued == Counter((message.kind, message.nbytes) for message in traffic)
    reductions = {REDUCE: num_buckets, **({REPLICAS: num_buckets} if ranks.is_hybrid else {})}
    assert traffic.count() == {GATHER: 7, **reductions}  # two of each block, and one of the root


def test_the_bytes_of_a_flat_step_are_three_times_the_model():
    """Two gathers of all but the root, one of the root, and one reduction, of 2 bytes; all but the rank's own part."""
    ranks = Ranks(8)
    plan = plan_of(GPT.build(), GPT.block, ranks)
    root, *blocks = (unit.full_nbytes for unit in plan.units)
    nbytes = traffic_of(plan, ranks).nbytes()
    assert nbytes[GATHER] == 7 * (root + 2 * sum(blocks)) // 8
    assert nbytes[REDUCE] == 7 * (root + sum(blocks)) // 8
    assert nbytes[REPLICAS] == 0


def test_a_rank_of_a_hybrid_receives_its_shard_twice_in_the_second_reduction():
    """A ring's all-reduce over 4 replicas moves 3/4 of the shard twice."""
    ranks = Ranks(8, 4)
    plan = plan_of(GPT.build(), GPT.block, ranks)
    shards = sum(unit.full_nbytes for unit in plan.units) // 8
    assert traffic_of(plan, ranks).nbytes()[REPLICAS] == 2 * 3 * shards // 4


def test_operations_are_those_that_torch_counts():
    """Without fusion, a block's and the head's operations are those that torch's counter sees in a forward."""
    with FlopCounterMode(display=False) as counter:
        GPT.build()(torch.zeros(GPT.batch, GPT.context, dtype=torch.long, device="meta"))
    forward = GPT.num_blocks * GPT.block_flops() + GPT.head_flops()
    assert counter.get_total_flops() == forward
    assert GPT.flops() == 3 * forward
    assert GPT.flops(recomputes=True) - GPT.flops() == GPT.num_blocks * GPT.block_flops()


def test_a_token_pays_for_the_experts_that_compute_it():
    """Of 4 experts of 3 matrices, 2 count; grouped queries have one head of keys and values; half the scores."""
    dim, tokens, hidden = 64, 16, 96
    attention = dim * 64 + 2 * dim * 32 + 64 * dim
    products = attention + 4 * dim + 2 * 3 * dim * hidden
    assert MOE.block_flops() == 2 * tokens * products + 4 * tokens * 8 * 64 // 2


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *(("GPT 7B", 6.9), ("GPT 13B", 13), ("GPT 30B", 30), ("Llama 70B", 70.6), ("GPT 175B", 175)),
        *(("Llama 405B", 405.9), ("MoE 235B", 235)),
    ],
)
def test_the_shapes_have_the_published_sizes(name, billions):
    """Parameters on the meta device, within 2 % of the published number (embeddings differ by the vocabulary)."""
    numel = sum(param.numel() for param in SHAPES[name]().build().parameters())
    assert numel == pytest.approx(billions * 1e9, rel=0.02)


def test_a_step_without_communication_is_arithmetic():
    """With links of infinite speed a step takes four forwards of the blocks, three of the head, and the optimizer."""
    machine = lossless(link=math.inf, network=math.inf)
    _, found = figured(GPT, Ranks(16), machine)
    head = GPT.head_flops() / machine.flops / machine.product_share
    assert found.compute == pytest.approx(3 * 4 * block_seconds(GPT, machine) + 3 * head)
    numel = sum(param.numel() for param in GPT.build().parameters())
    optimizer = ADAMW_NBYTES * numel / 16 / machine.memory / machine.memory_share
    assert found.optimizer == pytest.approx(optimizer, rel=0.01)  # padding
    assert found.total == pytest.approx(found.compute + found.optimizer)
    assert found.messages == found.host == 0


def test_a_step_without_arithmetic_is_its_messages():
    """On a device of infinite speed nothing overlaps: a step takes the sum of its messages, which share one lane."""
    machine = lossless(flops=math.inf, memory=math.inf)
    for ranks in (Ranks(8), Ranks(64), Ranks(8, 8)):
        traffic, found = figured(GPT, ranks, machine)
        assert found.compute == found.optimizer == 0
        assert found.total == pytest.approx(sum(message_seconds(one, machine, ranks) for one in traffic))


def test_a_slow_host_is_what_a_step_waits_for():
    """If the host takes longer than anything else, the step takes as long as the host, and the last work it issued."""
    traffic, found = figured(GPT, Ranks(8), MACHINES["H100"], HostTime(1.0))
    assert found.host == pytest.approx(3.5, rel=0.01)  # half of it in each forward and backward; root: backward only
    assert found.host <= found.total < 3.51
    assert traffic.count()[GATHER] == 7


def test_what_is_exposed_is_at_least_the_first_gather_and_the_last_reduction():
    """The root is gathered before anything computes, and reduced after everything; the rest may overlap."""
    machine = lossless(flops=1e12)
    traffic, found = figured(GPT, Ranks(8), machine)
    ends = traffic.forward[0], traffic.backward[-1].sends[-1]
    assert found.exposed >= sum(message_seconds(one, machine, Ranks(8)) for one in ends)
    assert found.exposed < found.messages


@pytest.mark.parametrize("ranks", [Ranks(8), Ranks(64), Ranks(8, 8), Ranks(16, 512)], ids=str)
def test_a_slower_network_never_makes_a_step_faster(ranks):
    """The time grows as the network gets slower, and does not depend on it inside one node."""
    totals = [figured(GPT, ranks, lossless(network=network))[1].total for network in (4e11, 4e10, 4e9)]
    assert totals == sorted(totals)
    assert (len(set(totals)) == 1) == (ranks.world_size == 8)


def test_the_time_of_a_message_term_by_term():
    """In a node NVLink limits a ring; across nodes the slower of NVLink and the node's network does."""
    machine = MACHINES["A100, 400 Gb/s"]
    nbytes = 8 * 10**9
    inside = message_seconds(Message(GATHER, ("a",), nbytes, 8), machine, Ranks(8))
    assert inside == pytest.approx(8.4e-6 + 7e9 / 300e9 / 0.78 + 7 * 3.4e-6)
    across = message_seconds(Message(GATHER, ("a",), nbytes, 16), machine, Ranks(16))
    assert across == pytest.approx(8.4e-6 + 4e9 / 50e9 / 0.78 + 14e-6 + 14 * 3.4e-6)
    # Each of the 8 ranks of a node has a ring of its own through 4 nodes, twice; all share the node's network.
    replicas = message_seconds(Message(REPLICAS, ("a",), nbytes // 8, 4), machine, Ranks(8, 4))
    assert replicas == pytest.approx(8.4e-6 + 2 * (6e9 / 50e9 / 0.78 + 3 * 14e-6))
    assert message_seconds(Message(REDUCE, ("a",), nbytes, 1), machine, Ranks(1)) == 0


def test_the_agreement_is_a_ring_in_each_group():
    """A rank waits for one hop and one message of 2,048 bytes for each other rank of its two groups."""
    machine = MACHINES["H100"]
    hop = machine.host_hop + 2048 / machine.host_network
    assert agreement_seconds(machine, Ranks(8, 4)) == pytest.approx((7 + 3) * hop)
    assert agreement_seconds(machine, Ranks(1)) == 0


def test_host_time_lies_on_lines_between_measured_numbers_of_ranks():
    """Between two measured numbers the time is on the line between them; outside, it continues or stays."""
    found = {8: 1.0, 1024: 2.0, 16384: 5.0}
    assert [host.at(found, world).unit for world in (2, 8, 1024, 16384)] == [1.0, 1.0, 2.0, 5.0]
    assert host.at(found, 516).unit == pytest.approx(1.5)
    assert host.at(found, 8704).unit == pytest.approx(3.5)


def test_the_hybrid_group_is_the_smallest_that_fits():
    """A group of half the size would exceed the memory; a model that fits into no group has none."""
    machine = MACHINES["H100"]
    shape = SHAPES["GPT 30B"]()
    found = scale.hybrid(shape, 2048, machine)
    assert found is not None
    assert scale.fits(shape, found, machine)
    assert found.num_shards == 8 or not scale.fits(shape, Ranks(found.num_shards // 2), machine)
    assert scale.hybrid(SHAPES["Llama 405B"](), 64, machine) is None


def test_only_tables_below_a_command_are_written_again():
    """The rows below a command of the script are replaced by those that it prints; other text stays."""
    text = "a\n\n```\n$ python benchmarks/scale.py published  # when\n```\n\n| old |\n|---|\n| 1 |\n\n| kept |\n"
    found = scale.with_tables(text)
    table = scale.markdown(scale.published_rows())
    assert found == f"a\n\n```\n$ python benchmarks/scale.py published  # when\n```\n\n{table}\n\n| kept |\n"
    assert table.count("\n") == 1 + len(PUBLISHED)


@pytest.mark.full
def test_the_tables_of_the_page_are_those_that_the_commands_print():
    """`python benchmarks/scale.py page` would change nothing on docs/notes/scale.md."""
    text = scale.PAGE.read_text()
    assert scale.with_tables(text) == text
    assert all(f"scale.py {name}" in text for name in scale.TABLES)
