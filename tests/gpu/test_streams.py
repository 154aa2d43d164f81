"""Streams that are late change no bit, the host does not wait, and without a wait of the engine a bit changes."""

import contextlib
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fairshard.engine.tree import units_below
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import ShardingStrategy
from fairshard.utils import device as devices
from fairshard.utils.buckets import Bucketer
from fairshard.utils.streams import Stream
from tests import sim
from tests.gpu.delays import COMPUTE, COPY, REDUCE, SIMULATED, UNSHARD, late, must_not_wait, sleep
from tests.gpu.training import DIM, Net, Way, batches, build, check_when_late, digest, own_part, train
from tests.kit import rank_device
from tests.on_ranks import on_ranks
from tests.sim.planted import planted

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
HELD = Way(placement="held", optimizer="cpu")
OFFLOAD, WRITES = Way(placement="offload"), Way(placement="offload", writes=True)

LATE = {
    "a gather never starts before its memory is free": (
        COMPUTE,
        [Way(), Way(low=BF16), Way("fully_shard"), Way("fully_shard", BF16)],
    ),
    "compute waits for casts and copies from the host": (
        UNSHARD,
        [
            *(Way("fully_shard", BF16), Way("orig", BF16), Way(low=BF16, strategy="NO_SHARD"), OFFLOAD),
            *(Way("fully_shard", placement="offload"), Way(low=BF16, placement="offload")),
        ],
    ),
    "`unshard()` between passes waits for the optimizer's step": (
        COMPUTE,
        [Way("fully_shard", unshards=True), Way("fully_shard", BF16, unshards=True)],
    ),
    "after `set_post_optim_event` gathers wait for that event": (COMPUTE, [Way("fully_shard", BF16, gives_event=True)]),
    "a shard in host memory is not changed while it is read": (
        UNSHARD,
        [OFFLOAD, WRITES, Way(low=BF16, placement="offload", optimizer="cpu"), Way("fully_shard", placement="offload")],
    ),
    "copies of gradients have ended when the backward returns": (
        COPY,
        [OFFLOAD, Way(placement="master"), Way("orig", placement="offload")],
    ),
    "held gradients are copied through two buffers in turn": (COPY, [HELD]),
    "held gradients are copied when they are ready": (
        COMPUTE,
        [HELD, Way(low=BF16, placement="held", optimizer="cpu"), Way(placement="held", optimizer="overlap")],
    ),
}


@pytest.mark.parametrize("claim", LATE)
@on_ranks(1)
def test_a_late_stream_changes_no_bit(claim):
    """Whatever stream is late, weights and losses are those of a run on time."""
    role, ways = LATE[claim]
    check_when_late(role, *ways)


@on_ranks(2)
def test_a_late_reduce_stream_changes_no_bit():
    """No bucket's memory is reused before it has been read, also where gradients are reduced in place."""
    no_shard = [Way(strategy="NO_SHARD"), Way(strategy="NO_SHARD", low=BF16)]
    check_when_late(REDUCE, Way(), Way("fully_shard", BF16), Way(bucket_cap_mb=0.0), *no_shard)


PLANTS = {
    "compute waits for the cast": ("utils.transfers:wait_all:wait", Way("fully_shard", BF16), UNSHARD),
    "compute waits for the copy from the host": ("utils.transfers:wait_all:wait", OFFLOAD, UNSHARD),
    "compute waits for a unit": ("params.flat_param:FlatParam.wait_unshard:wait", Way(low=BF16), UNSHARD),
    "gathers wait for the optimizer's step": ("engine.shared:Shared.await_step:wait", Way(low=BF16), COMPUTE),
    "freed memory has an event": ("engine.shared:Shared.note_free:record", Way(low=BF16), COMPUTE),
    "gathers wait for freed memory": ("engine.unit:Unit.unshard:wait-2", Way(low=BF16), COMPUTE),
    "copies to the host wait for sums": ("params.shard_grad:GradTransfers.copy:wait", OFFLOAD, COMPUTE),
    "the host waits for gradients": ("params.shard_grad:GradTransfers.wait:wait", OFFLOAD, COPY),
    "events make the host wait": ("utils.streams:Event.synchronize:wait", OFFLOAD, COPY),
    "a step waits for held gradients": ("optim.cpu_worker:GradStaging.fetch:wait", HELD, COPY),
    "reads of shards have an event": ("engine.root:Root.wait_for_reads:record", WRITES, UNSHARD),
    "the host waits for reads of shards": ("engine.root:Root.wait_for_reads:wait", WRITES, UNSHARD),
}
"""Some sites of ``tests/sim/test_planted.py``: where each is, and the way of training and the stream that show it."""


@pytest.mark.parametrize("claim", PLANTS)
@on_ranks(1)
def test_without_a_wait_some_bit_changes(claim):
    """Each wait that is removed from the engine shows when the stream that it waits for sleeps."""
    site, way, role = PLANTS[claim]
    if rank_device().type == SIMULATED:
        sim.order_by_seed(0)  # in this order work is done only when the host waits
    expected = digest(train(way))
    with planted(f"fairshard.{site}"), late(role):
        found = digest(train(way))
    assert _num_races() or found != expected


def _num_races():
    """Races on the simulated accelerator since the last call: there an order that happens to be right shows too."""
    if rank_device().type != SIMULATED:
        return 0
    from tests.sim.outcome import races_taken

    return len(races_taken())


@on_ranks(1, timeout=100.0)
def test_torchs_sanitizer_reports_nothing():
    """Training under torch's CUDA sanitizer: it sees a planted race, and nothing else."""
    if rank_device().type != "cuda":
        return
    from torch.cuda import _sanitizer

    found, check = [], _sanitizer.EventHandler._handle_kernel_launch
    handle = _sanitizer.ArgumentHandler._handle_argument

    def collect(handler, *args, **kwargs):
        found.extend(check(handler, *args, **kwargs))
        return []

    def handle_local(handler, value, *args, **kwargs):
        return handle(handler, getattr(value, "_local_tensor", value), *args, **kwargs)  # a DTensor has no address

    patch = mock.patch.object
    with (
        patch(_sanitizer.EventHandler, "_handle_kernel_launch", collect),
        patch(_sanitizer.ArgumentHandler, "_handle_argument", handle_local),
    ):
        _sanitizer.cuda_sanitizer.enable()
        try:
            target = torch.zeros(1024, device=rank_device())
            with torch.cuda.stream(torch.cuda.Stream()):
                target.add_(1)
            assert found, "the sanitizer has not reported a planted race, so it does not look"
            torch.cuda.synchronize()
            found.clear()
            placements = (("device", "sgd"), ("offload", "sgd"), ("offload", "cpu"))
            for door, low, (placement, step) in itertools.product(("wrapper", "fully_shard"), (None, BF16), placements):
                train(Way(door, low, placement, step), num_steps=3)
            assert not found
        finally:
            _sanitizer.cuda_sanitizer.disable()


@on_ranks(2)
def test_two_buckets_at_most_are_under_way():
    """Two buckets are under way at once while the reduce stream is late, and never more."""
    most, launch = [0], Bucketer.launch

    def counted(self, *bucket):
        launch(self, *bucket)
        most[0] = max(most[0], len(self._flying))

    with mock.patch.object(Bucketer, "launch", counted), late(REDUCE):
        train(Way(bucket_cap_mb=0.06))
    assert most[0] == 2


@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
@on_ranks(1, 2)
def test_the_host_does_not_wait_in_a_pass(door):
    """The host returns from a forward and from a backward while the device still sleeps before them."""
    model, inputs = build(Way(door, BF16)), batches(3)
    for each in inputs[:2]:
        model(each).square().mean().backward()
    loss = must_not_wait(lambda: model(inputs[2]).square().mean())
    must_not_wait(loss.backward)


class _Experts(nn.Module):
    """Two units that every rank calls; its loss depends on one of them."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x, number):
        outputs = [expert(x) for expert in self.experts]
        return self.last(outputs[number] + x)


@on_ranks(2)
def test_serving_another_ranks_expert_does_not_wait():
    """A rank that serves another rank's expert frees its gather, and its host does not wait for the device."""
    torch.manual_seed(0)
    model = _Experts().to(rank_device())
    for index in range(2):
        model.experts[index] = FSDP(model.experts[index])
    model = FSDP(model)
    held = []
    for each in batches(3):
        loss = model(each, dist.get_rank() % 2).square().mean()
        must_not_wait(loss.backward)
        held.append(devices.memory_allocated(rank_device()))
    assert held[-1] <= held[-2]


@on_ranks(4)
def test_replicas_reduce_behind_their_shards():
    """The all-reduce over replicas follows its reduce-scatter on the reduce stream; the host does not wait."""
    mesh = init_device_mesh(rank_device().type, (2, 2))
    digests = []
    for slow in (False, True):
        with late(REDUCE) if slow else contextlib.nullcontext():
            torch.manual_seed(0)
            net = Net().to(rank_device())
            options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
            for index, block in enumerate(net.blocks):
                net.blocks[index] = FSDP(block, **options)
            model = FSDP(net, **options)
            for step, each in enumerate(batches(3)):
                loss = model(each).square().mean()
                must_not_wait(loss.backward) if step else loss.backward()  # the first one builds communicators
            digests.append(digest(own_part(param.grad) for param in model.parameters()))
    assert digests[0] == digests[1]


@on_ranks(1)
def test_gathers_do_not_wait_for_work_after_the_event():
    """After ``set_post_optim_event`` the next gathers do not wait for later work on the compute stream."""
    model, inputs = build(Way("fully_shard", BF16)), batches(2)
    model(inputs[0]).square().mean().backward()
    model.set_post_optim_event(torch.accelerator.current_stream().record_event())
    sleep(200.0)
    slept = torch.accelerator.current_stream().record_event()
    model.unshard(async_op=True)
    _, unit = next(iter(units_below(model)))
    unit.root.shared.unshard_stream.record().synchronize()
    assert rank_device().type == SIMULATED or not slept.query()  # the simulator may go on while the host waits
    model(inputs[1])


@on_ranks(1)
def test_an_event_makes_the_stream_of_its_own_device_wait():
    """`Event.wait` makes the stream of the event's own device wait, whatever device is current."""
    kind = rank_device().type
    if devices.device_count(kind) < 2:
        return  # one process must see two devices
    here, other = (torch.device(kind, number) for number in range(2))
    slow, seen = torch.zeros(1024, device=other), torch.empty(1024, device=other)
    side = Stream(other)
    devices.set_device(other)
    try:
        torch.accelerator.synchronize()
        with side.use():
            sleep(50.0)
            slow.fill_(1.0)
        event = side.record()
        devices.set_device(here)
        event.wait()
        devices.set_device(other)
        seen.copy_(slow)
        assert bool((seen == 1).all())
    finally:
        devices.set_device(here)
