"""Two devices in one process."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from tests import sim
from tests.sim.outcome import races_taken
from tests.sim.ranks import on_sim


def train_on_both():
    """Gradient of a weight on device 0, of a loss on device 1."""
    first, second = nn.Linear(4, 4).to("sim:0"), nn.Linear(4, 4).to("sim:1")
    second(first(torch.ones(2, 4, device="sim:0")).to("sim:1")).sum().backward()
    return first.weight.grad, second.weight.grad


@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
@on_sim(1, num_devices=2)
def test_a_backward_crosses_devices(seed):
    """A model on two devices trains, and copies between them order both."""
    grads = train_on_both()
    assert [grad.device.index for grad in grads] == [0, 1]
    assert all(torch.isfinite(grad).all() for grad in grads)


@on_sim(1, num_devices=2)
def test_a_device_has_its_own_streams():
    """A copy to another device is ordered after its source and before its target's next use; other work is not."""
    source = torch.zeros(8, device="sim:0")
    torch.accelerator.synchronize()
    source.add_(1)
    copied = source.to("sim:1", non_blocking=True)
    copied.add_(1)
    assert races_taken() == []
    with torch.sim.device(1):
        assert torch.empty(1).device.index == 1
        assert torch.accelerator.current_stream().device.index == 1
    assert torch.accelerator.current_device_index() == 0


FORKS = """
import os, torch
from tests import sim
from tests.sim.test_devices import train_on_both
torch.set_num_threads(1)  # makes the pool of threads that a fork invalidates
sim.load(14)
for _ in range(60):
    pid = os.fork()
    if pid == 0:
        os._exit(0 if torch.isfinite(train_on_both()[0].sum().cpu()) else 1)
    assert os.waitpid(pid, 0)[1] == 0
os._exit(0)
"""


def test_autograds_threads_start_after_a_fork():
    """In forked children the threads of many devices start at once, without an abort: otherwise one in six aborts."""
    if sim.why_missing():
        pytest.skip(sim.why_missing())
    sim.build()
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=60)
