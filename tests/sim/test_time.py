"""Simulated time: tasks of a stream follow each other, streams overlap, waits and the host's waits push the time on."""

import torch

from tests import sim
from tests.sim.outcome import filled
from tests.sim.ranks import on_sim


def start():
    """Two tensors, at time zero, where each addition takes ten and each product of matrices one per operation."""
    tensors = filled(0), filled(0)
    matrix = torch.zeros(4, 4)
    sim.set_cost()
    sim.set_cost("aten::add", fixed=10)
    sim.set_cost("aten::mm", per_flop=1)
    sim.set_cost("aten::mul", per_byte=1)
    sim.reset()
    return *tensors, matrix


@on_sim(1)
def test_streams_overlap():
    """Equal work on two streams takes the time of one."""
    first, second, _ = start()
    first.add_(1)
    with torch.Stream("sim"):
        second.add_(1)
    assert sim.makespan() == 10


@on_sim(1)
def test_a_wait_makes_them_serial():
    """With a wait between them they take the sum."""
    first, second, _ = start()
    first.add_(1)
    side = torch.Stream("sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        second.add_(1)
    assert sim.makespan() == 20


@on_sim(1)
def test_the_hosts_waits_count():
    """What is issued after the host has waited starts after that."""
    first, second, _ = start()
    first.add_(1)
    torch.accelerator.synchronize()
    with torch.Stream("sim"):
        second.add_(1)
    assert sim.makespan() == 20


@on_sim(1)
def test_costs():
    """Products of matrices count operations, those of 4-byte elements twice; other tasks count their bytes."""
    _, _, matrix = start()
    matrix @ matrix
    assert sim.makespan() == 2 * 4 * 4 * 4 * matrix.element_size() / 2
    first, _, _ = start()
    first.mul_(2)
    written = first.nbytes
    assert sim.makespan() in (2 * written, 3 * written)  # in place: read and written, or read, written to itself
    assert [name for name, *_ in sim.trace()] == ["aten::mul"]


@on_sim(1)
def test_events_measure_simulated_time():
    """The time between two events is that of the work between them."""
    first, _, _ = start()
    begin, end = (torch.Event("sim", enable_timing=True) for _ in range(2))
    begin.record()
    first.add_(1)
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) == 10
