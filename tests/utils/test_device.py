"""Streams and events on a CPU do nothing, and memory figures are bytes."""

import mmap
import os

import pytest
import torch

from fairshard.utils import device as devices
from fairshard.utils.device import memory_allocated, peak_memory, take_device
from fairshard.utils.streams import Stream, now

CPU = torch.device("cpu")


def test_a_stream_of_the_cpu_is_the_program_itself():
    """Work under a CPU stream runs immediately, and waiting for its events returns immediately."""
    stream = Stream(CPU)
    with stream.use():
        value = torch.ones(3)
    event = stream.record()
    stream.wait(event)
    stream.wait(now(CPU))
    event.wait()
    assert value.sum() == 3


def test_memory_figures_are_bytes():
    """The resident size grows by the memory that is allocated and touched; the peak is at least that."""
    before = memory_allocated(CPU)
    with mmap.mmap(-1, 128 << 20) as block:  # from the system itself: malloc may have that much free
        torch.frombuffer(block, dtype=torch.uint8).fill_(1)
        grown = memory_allocated(CPU) - before
        assert grown > 64 << 20
        assert peak_memory(CPU) >= memory_allocated(CPU) - (64 << 20)


@pytest.mark.parametrize(
    ("rank", "index", "host"), [(0, 0, None), (1, 1, None), (2, 0, "fairshard-1"), (5, 1, "fairshard-2")]
)
def test_ranks_that_share_a_device_say_that_they_are_on_other_hosts(monkeypatch, rank, index, host):
    """Six ranks on two devices: NCCL sees three hosts, each with both devices."""
    taken = []
    monkeypatch.setattr(devices, "device_count", lambda kind: 2)
    monkeypatch.setattr(devices, "set_device", taken.append)
    monkeypatch.setattr(os, "environ", {})
    take_device("cuda", rank)
    assert taken == [torch.device("cuda", index)]
    assert os.environ.get("NCCL_HOSTID") == host
