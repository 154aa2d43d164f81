"""fp16 with a scaled loss: PyTorch's scaler and `ShardedGradScaler` on DTensors."""

import pytest
import torch
import torch.distributed as dist

from fairshard.nn import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fairshard.optim import CPUOptimizer, ShardedGradScaler
from tests.doors.fully_shard.assorted import Assorted
from tests.doors.fully_shard.models import shard_tiny
from tests.kit import rank_device
from tests.kit.doors import whole
from tests.models import loss_of_tiny
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state

pytestmark = pytest.mark.behaviour("loss scaling of fully_shard")

SCALERS = {
    "torch": lambda device: torch.amp.GradScaler(device, init_scale=2.0**6, growth_interval=2),
    "sharded": lambda device: ShardedGradScaler(device, init_scale=2.0**6, growth_interval=2),
}


def build(kind="no_dim", **kwargs):
    torch.manual_seed(1)
    return shard_tiny(Assorted(kind), mp_policy=MixedPrecisionPolicy(torch.float16), **kwargs)


def train(model, optimizer, scaler, poison=(), clip=False):
    """The scales after each step; in the steps ``poison``, one gradient element on the last rank is infinite."""
    scales = []
    for step in range(4):
        scaler.scale(loss_of_tiny(model, (step,))).backward()
        if step in poison and dist.get_rank() == dist.get_world_size() - 1:
            model.first.up.weight.grad.to_local().view(-1)[-1:] = float("inf")
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        before = whole(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = any(not torch.equal(new, before[name]) for name, new in whole(model).items())
        assert changed != (step in poison), step
        scales.append(scaler.get_scale())
    return scales


@on_ranks(2, in_full(3))
@pytest.mark.parametrize("offload", [in_full(False), True])
def test_both_scalers_agree(offload):
    """Both scalers give the same bits and scales, clipped or not; an overflow on one rank skips the step on all."""
    policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    for clip in (False, True):
        found = []
        for name, make in SCALERS.items():
            if name == "torch" and offload and rank_device().type != "cpu":
                continue  # torch's copies its scale from the device to the host, and does not wait for it
            model = build(offload_policy=policy)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
            scales = train(model, optimizer, make("cpu" if offload else rank_device().type), poison=(1,), clip=clip)
            assert scales == [64.0, 32.0, 32.0, 64.0]
            found.append(whole(model))
        assert_same_state(found[0], found[-1])


@on_ranks(2)
def test_ranks_without_gradients_take_part():
    """A rank whose gradients were dropped unscales nothing, and skips the step with the others."""
    model = build("few_rows")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = SCALERS["sharded"](rank_device().type)
    scaler.scale(loss_of_tiny(model, (0,))).backward()
    if dist.get_rank():
        optimizer.zero_grad()
    else:
        model.first.up.weight.grad.to_local().view(-1)[:1] = float("inf")
    before = whole(model)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 32.0
    assert_same_state(whole(model), before)


@on_ranks(2, in_full(3))
def test_with_the_optimizer_of_host_memory():
    """`CPUOptimizer` gives the plain optimizer's bits."""
    found = []
    for ours in (False, True):
        model = build(offload_policy=CPUOffloadPolicy())
        options = {"lr": 0.1, "momentum": 0.9, "foreach": False}
        scaler = SCALERS["sharded"](rank_device().type)
        if not ours:
            optimizer = torch.optim.SGD(model.parameters(), **options)
        else:
            optimizer = CPUOptimizer(model, torch.optim.SGD, **options)
        for step in range(3):
            loss = scaler.scale(loss_of_tiny(model, (step,)))
            loss = loss * (float("inf") if step == 1 and dist.get_rank() else 1.0)
            loss.backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 32.0
        found.append(whole(model))
    assert_same_state(*found)
