"""Pinned memory of the host is watched: the host must wait for the device's copies, in both directions."""

import threading

import pytest
import torch

from tests import sim
from tests.sim.device import loaded
from tests.sim.outcome import filled, races_taken
from tests.sim.ranks import on_sim

READS = {
    "sum": lambda host: host.sum(),
    "item": lambda host: host[0].item(),
    "tolist": lambda host: host.tolist(),
    "numpy": lambda host: host.numpy(),
    "view": lambda host: host.view(2, 4)[1].clone(),
    "copy": lambda host: torch.empty(8, device="cpu").copy_(host),
    "other thread": lambda host: run_in_thread(lambda: host + 1),
}


def run_in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def pinned(value=0.0):
    """Pinned memory that the device is done with."""
    return torch.full((8,), value, device="cpu").pin_memory()


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("read", READS)
@on_sim(1)
def test_the_host_reads_only_what_has_landed(read, waits):
    """Reading memory that a non-blocking copy from the device writes is a race, until its event has passed."""
    host, source = pinned(), filled(3)
    host.copy_(source, non_blocking=True)
    if waits:
        event = torch.Event("sim")
        event.record()
        event.synchronize()
    READS[read](host)
    found = races_taken()
    assert bool(found) != waits
    assert waits or "on the host" in found[0]
    assert waits or "write by `copy_ to host`" in found[0]


@pytest.mark.parametrize("waits", [False, True])
@on_sim(1)
def test_the_host_writes_only_what_the_device_has_read(waits):
    """Writing memory that a non-blocking copy to the device still reads is a race; reading it is none."""
    host, target = pinned(3.0), filled(0)
    target.copy_(host, non_blocking=True)
    host.sum()
    if waits:
        torch.accelerator.synchronize()
    host.zero_()
    found = races_taken()
    assert bool(found) != waits
    assert waits or "write by `aten::zero_` on the host" in found[0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("waits", [False, True])
@on_sim(1)
def test_an_optimizer_on_the_host_waits_for_its_gradients(waits, fused):
    """A step of Adam on pinned weights and gradients is a race while the gradients are on their way."""
    weight = torch.nn.Parameter(pinned(1.0))
    weight.grad = pinned()
    optimizer = torch.optim.Adam([weight], lr=0.1, fused=fused)
    weight.grad.copy_(filled(3), non_blocking=True)
    if waits:
        torch.accelerator.synchronize()
    optimizer.step()
    assert bool(races_taken()) != waits


@on_sim(1)
def test_a_copy_without_non_blocking_has_landed():
    """A blocking copy, and one to pageable memory, may be read at once."""
    host, pageable = pinned(), torch.empty(8, device="cpu")
    host.copy_(filled(3))
    pageable.copy_(filled(4), non_blocking=True)
    assert host.sum() == 24
    assert pageable.sum() == 32
    assert races_taken() == []


@on_sim(1)
def test_freed_pinned_memory_is_not_reused_while_the_device_needs_it():
    """torch's pinned allocator hands memory out again only when the device is done with it."""
    sim.configure(0, 0.0, "random")
    host, source = pinned(), filled(3)
    address = host.data_ptr()
    host.copy_(source, non_blocking=True)
    del host
    other = pinned()
    assert other.data_ptr() != address
    torch.accelerator.synchronize()
    assert pinned().data_ptr() == address
    assert races_taken() == []


@pytest.mark.parametrize("waits", [False, True])
@on_sim(1)
def test_registered_memory_is_unregistered_after_its_last_copy(waits):
    """Unregistering memory that a copy still reads is a race: its owner may free it."""
    host, target = torch.ones(8, device="cpu"), filled(0)
    loaded().pin(host.data_ptr(), host.nbytes)
    assert host.is_pinned()
    target.copy_(host, non_blocking=True)
    if waits:
        torch.accelerator.synchronize()
    loaded().unpin(host.data_ptr())
    assert not host.is_pinned()
    assert bool(races_taken()) != waits
