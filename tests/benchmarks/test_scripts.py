"""Each script measures what it says on a small model."""

import subprocess
import sys
from pathlib import Path

import pytest
import record

FOLDER = Path(__file__).parents[2] / "benchmarks"
COMMANDS = {
    "run.py": "--engines fairshard,fsdp2 --steps 4 --repeat 1",
    "offload.py": "--variants none,offload,held,fsdp2 --steps 4 --repeat 1",
    "checkpoint.py": "--repeat 1",
    "muon.py": "--steps 4 --repeat 1",
}
MEASURED = {
    "run.py": {"fairshard", "fsdp2", "fsdp2-prefetch"},
    "offload.py": {"none", "offload", "held", "fsdp2"},
    "checkpoint.py": {"fairshard save", "fsdp2 + dcp save", "fairshard load", "fairshard async"},
    "muon.py": {"torch", "fairshard", "owned"},
}


@pytest.mark.cpu_only("starts processes of its own, on gloo")
@pytest.mark.full
@pytest.mark.parametrize("script", COMMANDS)
def test_it_runs_on_a_small_model(script, tmp_path):
    """Losses agree or what was saved is loaded, every engine is measured on both ranks, and the result is written."""
    out = tmp_path / "out.json"
    command = [sys.executable, str(FOLDER / script), "--model", "gpt-5m", *COMMANDS[script].split(), "--out", str(out)]
    if script == "checkpoint.py":
        command += ["--folder", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    runs = record.read(out)["runs"]
    assert {len(run["ranks"]) for run in runs} == {2}
    assert {run["engine"] for run in runs} >= MEASURED[script]
    assert all(name in result.stdout for name in MEASURED[script])
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.parametrize("script", [*COMMANDS, "overlap.py", "collectives.py"])
def test_it_says_what_it_does(script):
    """``--help`` prints the commands that the file describes."""
    command = [sys.executable, str(FOLDER / script), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "python benchmarks/" in result.stdout
