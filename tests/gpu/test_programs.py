"""Libraries of a device on sharded models: cuDNN, inductor, NCCL's fp16, the profiler."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.kit import rank_device
from tests.on_ranks import on_ranks
from tests.sim.cells import BY_NAME
from tests.sim.training import batches, build

pytestmark = pytest.mark.gpu


def steps(model, inputs):
    """The losses of one step on each of ``inputs``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    losses = []
    for each in inputs:
        loss = model(each).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@on_ranks(1)
def test_an_lstm_trains_as_the_plain_one():
    """cuDNN's LSTM on leaves trains as the plain one, to rounding."""
    if rank_device().type != "cuda":
        return

    class Last(nn.LSTM):
        def forward(self, x):
            return super().forward(x)[0]

    torch.manual_seed(0)
    plain = Last(64, 64, num_layers=2, batch_first=True).to(rank_device())
    model = FSDP(copy.deepcopy(plain))
    x = torch.randn(4, 12, 64, device=rank_device())
    expected, found = steps(plain, [x] * 3), steps(model, [x] * 3)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)  # sums of 64 terms, perhaps in another order


@on_ranks(2)
def test_a_sum_beyond_fp16_has_an_exact_mean():
    """Gradients whose sum overflows fp16 have an exact mean, because each is divided by a power of two first."""
    layer = nn.Linear(1, 1, bias=False).to(rank_device())
    model = FSDP(layer, mixed_precision=True, compute_dtype=torch.float16)
    model(torch.full((1, 1), 40000.0, device=rank_device())).sum().backward()
    grad = model.params[0].grad
    assert dist.get_rank() or grad.float().sum().item() == 40000.0


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@on_ranks(1, timeout=150.0)
def test_compiled_blocks_train_as_uncompiled_ones(mode):
    """Blocks compiled by inductor train as uncompiled ones, and nothing is compiled after step 2."""
    from torch._dynamo.utils import counters

    if rank_device().type != "cuda":
        return
    cell = BY_NAME["fully_shard-fp32-device"]
    inputs = [each for each, _ in batches(cell, 5)]
    expected = steps(build(cell), inputs)
    torch.compiler.reset()
    model = build(cell)
    for block in model.blocks:
        block.compile(mode=mode)
    found = steps(model, inputs[:2])
    before = counters["stats"]["unique_graphs"]
    steps(model, inputs[2:])
    torch.testing.assert_close(found, expected[:2], rtol=1e-4, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == before


@on_ranks(1)
def test_a_profile_has_the_regions_of_each_unit():
    """A profile has the regions of each unit; on CUDA they also lie above the kernels that they launch."""
    cell = BY_NAME["fully_shard-small-buckets"]
    model, inputs = build(cell), [each for each, _ in batches(cell, 3)]
    steps(model, inputs[:2])
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if rank_device().type == "cuda" else [])]
    with profile(activities=kinds) as found:
        steps(model, inputs[2:])
        torch.get_device_module(rank_device().type).synchronize()
    regions = [event for event in found.events() if event.name.startswith("fairshard::")]
    assert all(any(f"blocks.{index}" in event.name for event in regions) for index in range(3))
    on_device = any(event.device_type == torch.autograd.DeviceType.CUDA for event in regions)
    assert on_device == (rank_device().type == "cuda")
