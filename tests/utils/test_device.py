"""Streams and events on a CPU do nothing, and memory figures are bytes."""

import mmap

import torch

from fairshard.utils.device import memory_allocated, peak_memory
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
