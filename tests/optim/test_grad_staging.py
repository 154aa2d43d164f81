"""Held gradients are copied to host memory through two alternating buffers."""

import time
from unittest import mock

import torch

from fairshard.optim import CPUOptimizer
from fairshard.optim.shard_step import Twin
from tests.models import mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn


@on_ranks(1, 2)
def test_a_buffer_is_not_written_before_its_gradient_is_stepped():
    """However late the worker is, each shard is stepped with its own gradient: results are those without offload."""
    run = Twin.step_one

    def late(self, *args):
        time.sleep(0.02)
        run(self, *args)

    sizes = (4, 9, 7, 5, 6, 3)
    model, twin = wrap_each(mlp(*sizes), cpu_offload=True, move_grads_to_cpu=False), wrap_each(mlp(*sizes))
    optimizer = CPUOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9, fused=True)
    with mock.patch.object(Twin, "step_one", late):
        for step in range(2):
            for one, of_one in ((model, optimizer), (twin, plain)):
                one(randn(3, 4, key=step)).square().sum().backward()
                of_one.step()
                of_one.zero_grad()
    assert_same_state(model.state_dict(), twin.state_dict())
