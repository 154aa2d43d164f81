"""When a rank dies, stops, diverges or runs out of batches, the others say which and where, exit, and can resume."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doors.wrapper.drill_run import FAULTS

pytestmark = pytest.mark.behaviour("faults of ranks")

REPOSITORY = Path(__file__).parents[3]


def drill(*args):
    """Run rounds in a separate process, because the drill forks; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.doors.wrapper.drill", *args], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.cpu_only("starts processes of its own, on gloo")
@pytest.mark.full
def test_each_fault_once():
    """The other ranks name the rank with a fault, even if it is rank 0, and the run resumes from its checkpoint."""
    faults = [fault for fault in FAULTS if fault != "stopped in a save"]  # see tests/doors/test_alone.py
    printed = drill("--times", "1", "--timeout", "3", "--faults", *faults)
    assert re.findall(r"^round \d+: (.*), rank \d of 3", printed, re.MULTILINE) == faults
    assert "killed in forward, rank 0" in printed


@pytest.mark.full
@pytest.mark.cpu_only("starts processes of its own, on gloo")
def test_what_five_ranks_do_not_notice_at_once_is_told_too():
    """Collectives of five ranks match by their order alone, so other modules of the same shape would go unnoticed."""
    faults = ["other order", "other evaluation"]
    printed = drill("--times", "1", "--timeout", "3", "--world-sizes", "5", "--faults", *faults)
    assert re.findall(r"^round \d+: (.*), rank \d of 5", printed, re.MULTILINE) == faults


@pytest.mark.cpu_only("starts processes of its own, on gloo")
@pytest.mark.full
def test_each_fault_on_each_rank():
    """The same holds for a fault on any rank, and when the run resumes on one rank fewer."""
    assert f"{6 * len(FAULTS) - 3} rounds" in drill("--times", "6")
