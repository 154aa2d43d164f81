"""The line that a rank reports is read while its training runs on."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.cpu_only("starts a process of its own")
def test_a_line_is_read_while_frames_end_and_garbage_is_collected():
    """Each read gives the line of the user; with frames that have ended, Python up to 3.11 would crash in it."""
    command = [sys.executable, "-m", "tests.checks.positions_run", "4"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
