"""The benchmark of checkpoints."""

import subprocess
import sys
from pathlib import Path

import pytest
import record

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "checkpoint.py"


@pytest.mark.cpu_only("starts processes of its own, on gloo")
@pytest.mark.full
def test_it_runs_on_a_small_model(tmp_path):
    """Every engine loads what it saved, and everything is measured on both ranks."""
    out = tmp_path / "out.json"
    command = [sys.executable, str(SCRIPT), "--model", "gpt-5m", "--repeat", "1", "--out", str(out)]
    result = subprocess.run([*command, "--folder", str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "what was loaded is what was saved" in result.stdout
    runs = record.read(out)["runs"]
    assert {len(run["ranks"]) for run in runs} == {2}
    names = {run["name"] for run in runs}
    assert names >= {"dd, one stream", "fairshard save", "fsdp2 + dcp save", "fairshard async"}
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
