"""The schedule on the simulated accelerator: all ranks issue the same, whatever each one reaches, and have no race."""

import pytest

from tests.engine.test_contract import PASSES, check
from tests.on_ranks import in_full
from tests.sim.ranks import on_sim


@pytest.mark.parametrize("seed", [in_full(None), 1])
@pytest.mark.parametrize("name", [in_full(name) if place % 2 else name for place, name in enumerate(PASSES)])
@on_sim(2)
def test_all_ranks_issue_the_same(name, seed):
    """The backend compares the name and the sizes of each collective on all ranks, in the order of issue."""
    first = 40 * list(PASSES).index(name)
    check(range(first, first + 2), name)
