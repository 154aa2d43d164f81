"""Ranks that are killed or stopped while they train and save: the run resumes as if nothing had happened."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def lines_of(loop, what, number, seed):
    """Run a loop in its own process, because it forks; return the lines of what it did, by their first word."""
    command = [sys.executable, "-m", f"tests.checkpoint.{loop}", f"--{what}s", str(number), "--seed", str(seed)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return re.findall(rf"^{what} \d+: .*", done.stdout, re.MULTILINE)


@pytest.mark.cpu_only("starts processes of its own, on gloo")
@pytest.mark.parametrize(("num_kills", "seed"), [(3, 1), pytest.param(40, 2, marks=pytest.mark.full)])
def test_a_killed_run_goes_on_from_the_newest_durable_step(num_kills, seed):
    """Whenever one rank or all are killed, the last start ends with the same bits as a run that was never killed.

    On another number of ranks it ends with the same weights, except for rounding.
    """
    kills = lines_of("kill_loop", "kill", num_kills, seed)
    assert len(kills) == num_kills
    assert 3 * sum("inside" in line for line in kills) >= num_kills, kills


@pytest.mark.cpu_only("starts processes of its own, on gloo")
@pytest.mark.parametrize(("num_signals", "seed"), [(1, 1), pytest.param(50, 2, marks=pytest.mark.full)])
def test_a_stopped_run_has_saved_its_last_step(num_signals, seed):
    """Whichever ranks get the signal, all save the same last step; the last start ends with an unbroken run's bits."""
    signals = lines_of("term_loop", "signal", num_signals, seed)
    assert len(signals) == num_signals
    assert all(re.search(r"all ranks saved step \d+", line) for line in signals)
