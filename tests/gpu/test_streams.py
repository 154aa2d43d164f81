"""Streams that are late change no bit, the host does not wait, and without a wait of the engine a bit changes."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.engine.tree import units_below
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.utils import device as devices
from tests import sim
from tests.gpu.delays import COMPUTE, COPY, REDUCE, SIMULATED, UNSHARD, late, must_not_wait, sleep
from tests.kit import rank_device
from tests.on_ranks import on_ranks
from tests.sim.cells import BASIC, BY_NAME
from tests.sim.planted import planted
from tests.sim.training import batches, build, digest, train

pytestmark = pytest.mark.gpu

LATE = {
    "a gather never starts before its memory is free": (
        COMPUTE,
        ("wrapper-fp32-device", "wrapper-bf16-device", "fully_shard-fp32-device", "fully_shard-bf16-device"),
    ),
    "compute waits for casts and copies from the host": (
        UNSHARD,
        (
            *("fully_shard-bf16-device", "orig-bf16-device", "no-shard", "wrapper-fp32-offload"),
            *("fully_shard-fp32-offload", "wrapper-bf16-offload"),
        ),
    ),
    "`unshard()` between passes waits for the optimizer's step": (COMPUTE, ("explicit-fp32", "explicit")),
    "after `set_post_optim_event` gathers wait for that event": (COMPUTE, ("event",)),
    "a shard in host memory is not changed while it is read": (
        UNSHARD,
        ("wrapper-fp32-offload", "write-offload", "cpu-optimizer", "fully_shard-fp32-offload"),
    ),
    "copies of gradients have ended when the backward returns": (
        COPY,
        ("small-buckets-offload", "master", "orig-fp32-offload"),
    ),
    "held gradients are copied through two buffers in turn": (COPY, ("held",)),
    "held gradients are copied when they are ready": (COMPUTE, ("held", "held-overlap")),
}
"""What is claimed, the stream that is late, and the cells of ``tests/sim/cells.py`` that use it."""


def check_when_late(role, *names):
    """Each of the cells ``names`` gives the same bits when work on the stream of ``role`` is late."""
    for name in names:
        expected = digest(train(BY_NAME[name]))
        with late(role):
            assert digest(train(BY_NAME[name])) == expected, f"a late {role} stream changes the weights of {name}"


@pytest.mark.parametrize("claim", LATE)
@on_ranks(1)
def test_a_late_stream_changes_no_bit(claim):
    """Whatever stream is late, weights and losses are those of a run on time."""
    role, names = LATE[claim]
    check_when_late(role, *names)


@on_ranks(2)
def test_a_late_reduce_stream_changes_no_bit():
    """No bucket's memory is reused before it has been read, also where gradients are reduced in place."""
    check_when_late(REDUCE, "wrapper-fp32-device", "fully_shard-bf16-device", "small-buckets", "no-shard")


@on_ranks(4)
def test_replicas_reduce_behind_their_shards():
    """The all-reduce over replicas follows its reduce-scatter on the reduce stream."""
    check_when_late(REDUCE, "hybrid", "fully_shard-hybrid")


PLANTS = {
    "compute waits for the cast": ("utils.transfers:wait_all:wait", "fully_shard-bf16-device", UNSHARD),
    "compute waits for the copy from the host": ("utils.transfers:wait_all:wait", "wrapper-fp32-offload", UNSHARD),
    "compute waits for a unit": ("params.flat_param:FlatParam.wait_unshard:wait", "wrapper-bf16-device", UNSHARD),
    "gathers wait for the optimizer's step": ("engine.shared:Shared.await_step:wait", "wrapper-bf16-device", COMPUTE),
    "freed memory has an event": ("engine.shared:Shared.note_free:record", "wrapper-bf16-device", COMPUTE),
    "gathers wait for freed memory": ("engine.unit:Unit.unshard:wait-2", "wrapper-bf16-device", COMPUTE),
    "copies to the host wait for sums": ("params.shard_grad:GradTransfers.copy:wait", "small-buckets-offload", COMPUTE),
    "the host waits for gradients": ("params.shard_grad:GradTransfers.wait:wait", "small-buckets-offload", COPY),
    "events make the host wait": ("utils.streams:Event.synchronize:wait", "small-buckets-offload", COPY),
    "a step waits for held gradients": ("optim.cpu_worker:GradStaging.fetch:wait", "held", COPY),
    "reads of shards have an event": ("engine.root:Root.wait_for_reads:record", "write-offload", UNSHARD),
    "the host waits for reads of shards": ("engine.root:Root.wait_for_reads:wait", "write-offload", UNSHARD),
}
"""Some sites of ``tests/sim/test_planted.py``: where each is, and the cell and the stream that show it."""


@pytest.mark.parametrize("claim", PLANTS)
@on_ranks(1)
def test_without_a_wait_some_bit_changes(claim):
    """Each wait that is removed from the engine shows when the stream that it waits for sleeps."""
    site, name, role = PLANTS[claim]
    if rank_device().type == SIMULATED:
        sim.order_by_seed(0)  # in this order work is done only when the host waits
    expected = digest(train(BY_NAME[name]))
    with planted(f"fairshard.{site}"), late(role):
        found = digest(train(BY_NAME[name]))
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
            for cell in [*BASIC, BY_NAME["cpu-optimizer"]]:
                train(cell)
            assert not found
        finally:
            _sanitizer.cuda_sanitizer.disable()


@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
@on_ranks(1, 2)
def test_the_host_does_not_wait_in_a_pass(door):
    """The host returns from a forward and from a backward while the device still sleeps before them."""
    cell = BY_NAME[f"{door}-bf16-device"]
    model, pairs = build(cell), batches(cell, 3)
    for inputs, _ in pairs[:2]:
        model(inputs).square().mean().backward()
    loss = must_not_wait(lambda: model(pairs[2][0]).square().mean())
    must_not_wait(loss.backward)


class _Experts(nn.Module):
    """Two units that every rank calls; its loss depends on one of them."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.last = nn.Linear(32, 32)

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
    inputs, held = torch.randn(16, 32, device=rank_device()), []
    for _ in range(3):
        loss = model(inputs, dist.get_rank() % 2).square().mean()
        must_not_wait(loss.backward)
        held.append(devices.memory_allocated(rank_device()))
    assert held[-1] <= held[-2]


@on_ranks(1)
def test_gathers_do_not_wait_for_work_after_the_event():
    """After ``set_post_optim_event`` the next gathers do not wait for later work on the compute stream."""
    cell = BY_NAME["fully_shard-bf16-device"]
    model, ((inputs, _), (others, _)) = build(cell), batches(cell, 2)
    model(inputs).square().mean().backward()
    model.set_post_optim_event(torch.accelerator.current_stream().record_event())
    sleep(200.0)
    slept = torch.accelerator.current_stream().record_event()
    model.unshard(async_op=True)
    _, unit = next(iter(units_below(model)))
    unit.root.shared.unshard_stream.record().synchronize()
    assert rank_device().type == SIMULATED or not slept.query()  # the simulator may go on while the host waits
    model(others)
