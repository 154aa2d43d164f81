"""Ranks are killed with -9 while they train and save; the run resumes as if nothing had happened."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def kill(num_kills, seed):
    """Run the loop in its own process, because it forks; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.kill_loop", "--kills", str(num_kills), "--seed", str(seed)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.cpu_only("starts processes of its own, on gloo")
@pytest.mark.parametrize(("num_kills", "seed"), [(3, 1), pytest.param(20, 2, marks=pytest.mark.full)])
def test_a_killed_run_goes_on_from_the_newest_durable_step(num_kills, seed):
    """Whenever one rank or all are killed, the last start ends with the same bits as a run that was never killed."""
    printed = kill(num_kills, seed)
    kills = re.findall(r"^kill .*", printed, re.MULTILINE)
    inside = [line for line in kills if "inside a save" in line]
    assert len(kills) == num_kills
    assert 3 * len(inside) >= num_kills, printed
