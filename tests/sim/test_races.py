"""Every two accesses to the same memory that no wait orders are reported; ordered ones are not."""

import pytest
import torch

from tests import sim
from tests.sim.outcome import filled, races_taken
from tests.sim.ranks import on_sim, pool

SEEDS = (None, 0, 1, 2)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("waits", [False, True])
@on_sim(1)
def test_a_read_on_another_stream_must_wait_for_the_write(waits, seed):
    """A stream that reads what another one writes is reported with both places, unless it waits for that stream."""
    source = filled(0)
    main, side = torch.accelerator.current_stream(), torch.Stream("sim")
    source.add_(1)
    if waits:
        side.wait_stream(main)
    with side:
        result = source * 2
    found = races_taken()
    if waits:
        assert found == []
        assert result.tolist() == [2.0] * 8
    else:
        assert "read by `aten::mul` on stream" in found[0]
        assert "write by `aten::add` on stream" in found[0]
        assert found[0].count("test_races.py") == 2


@pytest.mark.parametrize("waits", [False, True])
@on_sim(1)
def test_a_write_must_wait_for_a_read(waits):
    """A stream that overwrites what another one still reads is reported, unless it waits."""
    source = filled(3)
    main, side = torch.accelerator.current_stream(), torch.Stream("sim")
    with side:
        result = source * 2
    if waits:
        main.wait_stream(side)
    source.zero_()
    assert bool(races_taken()) != waits
    assert not waits or result.tolist() == [6.0] * 8


@pytest.mark.parametrize("waits", [False, True])
@on_sim(1)
def test_an_event_orders_what_precedes_it_only(waits):
    """Waiting for an event orders the tasks before its record, not those after it."""
    source = filled(0)
    main, side = torch.accelerator.current_stream(), torch.Stream("sim")
    event = torch.Event("sim")
    if not waits:
        event.record(main)
    source.add_(1)
    if waits:
        event.record(main)
    side.wait_event(event)
    with side:
        source * 2
    assert bool(races_taken()) != waits


@on_sim(1)
def test_accesses_to_other_bytes_of_a_tensor_do_not_race():
    """Two streams may write the columns of one matrix: only the same bytes are a race."""
    matrix = filled(0, 12).view(3, 4)
    side = torch.Stream("sim")
    matrix[:, :2].fill_(1)
    with side:
        matrix[:, 2:].fill_(2)
    assert races_taken() == []
    with side:
        matrix[:, 1:3].fill_(3)
    matrix[0].fill_(4)
    assert len(races_taken()) == 1


@on_sim(1)
def test_two_reads_do_not_race():
    """Two streams may read the same memory."""
    source = filled(1)
    with torch.Stream("sim"):
        source + 1
    source + 2
    assert races_taken() == []


@on_sim(1)
def test_an_unordered_read_is_wrong_in_some_order():
    """Of the orders that seeds give, one reads before the write and one after it."""
    seen = set()
    for seed in range(8):
        sim.order_by_seed(seed)
        source = filled(0, 1)
        source.add_(1)
        with torch.Stream("sim"):
            result = source * 2
        torch.accelerator.synchronize()
        seen.add(result.item())
    sim.reset()
    assert seen == {0.0, 2.0}


@pytest.mark.parametrize("keeps", [False, True])
@on_sim(1)
def test_freed_memory_is_reused_at_once_unless_recorded(keeps):
    """Memory freed while another stream reads it is overwritten with NaN, unless `record_stream` was called."""
    sim.configure(0, 0.0, "random")  # work is done only when the host waits
    source = filled(3)
    side = torch.Stream("sim")
    with side:
        result = source * 1
    if keeps:
        source.record_stream(side)
    address = source.data_ptr()
    del source
    other = torch.empty(8, device="sim")
    assert (other.data_ptr() == address) != keeps
    torch.accelerator.synchronize()
    found = races_taken()
    assert bool(found) != keeps
    assert keeps or "write by `allocate`" in found[0]
    assert not keeps or result.tolist() == [3.0] * 8
    assert torch.isnan(other).all()


@on_sim(1)
def test_raises_at_the_second_access_when_asked_to():
    """With ``raises`` the access that comes second raises where it is made."""
    source = filled(0)
    source.add_(1)
    sim.watch(raises=True)
    with pytest.raises(RuntimeError, match="unordered: read by `aten::mul`"):
        with torch.Stream("sim"):
            source * 2
    sim.watch()
    races_taken()


def race():
    """A task with a race that it does not look at."""
    source = filled(0)
    source.add_(1)
    with torch.Stream("sim"):
        source * 2


def nothing():
    """A task without work."""


def test_a_task_with_a_race_fails_and_the_next_one_does_not():
    """The rank that had a race fails with the report; the same process then runs a clean task."""
    if sim.why_missing():
        pytest.skip(sim.why_missing())
    test = on_sim(1)(nothing)
    test(1)  # configures the pool
    with pytest.raises(AssertionError, match="1 races on the simulated accelerator"):
        pool().run(1, race)
    pool().run(1, nothing)
