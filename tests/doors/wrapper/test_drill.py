"""Ranks die, part ways and run dry: who is left says who and where, ends, and goes on when started again."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doors.wrapper.drill_run import FAULTS

REPOSITORY = Path(__file__).parents[3]


def drill(*args):
    """Run rounds in a process of its own, for it forks; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.doors.wrapper.drill", *args], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.cpu_only
def test_each_fault_once():
    """A fault of one rank, rank 0 among them, is named by the others, and the run goes on from its checkpoint."""
    printed = drill("--times", "1", "--timeout", "3")
    assert re.findall(r"^round \d+: (.*), rank \d", printed, re.MULTILINE) == list(FAULTS)
    assert "killed in forward, rank 0" in printed


@pytest.mark.cpu_only
@pytest.mark.full
def test_each_fault_on_each_rank():
    """The same whoever it is, and on one rank less after it."""
    assert "21 rounds" in drill("--times", "3")
