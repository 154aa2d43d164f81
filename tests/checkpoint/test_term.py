"""Runs that SIGTERM stops at random moments lose no finished step."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.cpu_only("starts processes of its own, on gloo")
@pytest.mark.parametrize(("num_signals", "seed"), [(1, 1), pytest.param(50, 2, marks=pytest.mark.full)])
def test_a_stopped_run_has_saved_its_last_step(num_signals, seed):
    """Whichever ranks get the signal, all save the same last step; the last start ends with an unbroken run's bits."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.term_loop", "--signals", str(num_signals), "--seed", str(seed)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert len(re.findall(r"^signal .* all ranks saved step \d+", done.stdout, re.MULTILINE)) == num_signals
