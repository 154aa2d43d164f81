"""Shards, gradients and optimizer state in host memory, also on machines without a GPU."""

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy

from fairshard.nn import CPUOffloadPolicy, OffloadPolicy
from tests.doors.fully_shard.assorted import Assorted
from tests.doors.fully_shard.models import shard_tiny
from tests.kit import rank_device
from tests.kit.doors import no_sync, whole
from tests.models import loss_of_tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state

pytestmark = pytest.mark.behaviour("offload of fully_shard")

POLICIES = [OffloadPolicy(), CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False), TorchCPUOffloadPolicy()]


@on_ranks(3)
def test_offload_changes_no_bit():
    """Offloading changes no bit, with any policy, and tensors stay in host memory."""
    found = []
    for policy in POLICIES:
        torch.manual_seed(1)
        model = shard_tiny(Assorted("no_dim"), offload_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
        home = rank_device().type if type(policy) is OffloadPolicy else "cpu"
        for step in range(2):
            with no_sync(model):
                loss_of_tiny(model, (step, 0)).backward()
            loss_of_tiny(model, (step, 1)).backward()
            optimizer.step()
            assert {tensor.device.type for param in model.parameters() for tensor in (param, param.grad)} == {home}
            optimizer.zero_grad(set_to_none=step == 0)
        found.append(whole(model))
    for state in found[1:]:
        assert_same_state(state, found[0])


@on_ranks(2)
def test_gradients_are_there_when_the_backward_is_over():
    """A gradient is complete right after the backward, and in hooks; later backwards do not write to a kept one."""
    torch.manual_seed(1)
    model = shard_tiny(Assorted("plain"), offload_policy=CPUOffloadPolicy())
    seen = {}

    def look(param):
        seen[param] = param.grad.to_local().clone()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(look)
    kept = []
    for step in range(3):
        loss_of_tiny(model, (step,)).backward()
        for param in model.parameters():
            assert torch.equal(param.grad.to_local(), seen[param])
        kept.append([(param.grad, param.grad.to_local().clone()) for param in model.parameters()])
        model.zero_grad()
    for grad, value in (pair for pairs in kept for pair in pairs):
        assert torch.equal(grad.to_local(), value)


@on_ranks(2)
def test_low_precision_masters_are_stepped_with_a_warning():
    """Low-precision masters are stepped as in PyTorch, but with a warning."""
    torch.manual_seed(1)
    model = shard_tiny(Assorted("plain").bfloat16(), offload_policy=CPUOffloadPolicy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.warns(UserWarning, match="should step fp32 masters"):
        optimizer.step()
