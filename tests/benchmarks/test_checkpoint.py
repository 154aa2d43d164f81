"""The benchmark of checkpoints."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "checkpoint.py"


@pytest.mark.cpu_only
@pytest.mark.full
def test_it_runs_on_a_small_model(tmp_path):
    """Every engine loads what it saved, and everything is measured on both ranks."""
    out = tmp_path / "out.json"
    command = [sys.executable, str(SCRIPT), "--model", "gpt-5m", "--repeat", "1", "--out", str(out)]
    result = subprocess.run([*command, "--folder", str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "what was loaded is what was saved" in result.stdout
    ranks = json.loads(out.read_text())["ranks"]
    names = [{sample["name"] for sample in rank["samples"]} for rank in ranks]
    assert len(names) == 2
    assert names[0] == names[1] >= {"dd, one stream", "fairshard save", "fsdp2 + dcp save", "fairshard async"}
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
