"""Every two accesses to the same memory that no wait orders are reported; ordered ones are not."""

import pytest
import torch

from tests import sim
from tests.sim.ranks import on_sim

SEEDS = (None, 0, 1, 2)


def taken_races():
    """The races so far, which the end of the test then does not see."""
    torch.accelerator.synchronize()
    found = sim.races()
    sim.reset()
    return found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("waits", [False, True])
@on_sim(1)
def test_a_read_on_another_stream_must_wait_for_the_write(waits, seed):
    """A stream that reads what another one writes is reported, unless it waits for that stream."""
    source = torch.zeros(8, device="sim")
    side = torch.Stream("sim")
    side.wait_stream(torch.accelerator.current_stream())
    source.add_(1)
    if waits:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        result = source * 2
    found = taken_races()
    assert bool(found) != waits
    if waits:
        assert result.tolist() == [2.0] * 8
    else:
        assert "read by `aten::mul` on stream" in found[0]
        assert "write by `aten::add` on stream" in found[0]
        assert "test_races.py" in found[0]
