"""Runs of ``fairshard train`` as its users start them, in processes of their own."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import fairshard

COMMAND = [sys.executable, "-m", "fairshard.cli.main", "train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "fairshard.cli.train"]


def environment(**more):
    """This process's environment without the variables that launched it or set its threads."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "PYTHONPATH": str(Path(fairshard.__file__).parents[1]), **more}


def run(command, cwd=None):
    """Run ``command`` to its end."""
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=600)


def train(*arguments):
    """Run ``fairshard train``, which must succeed; returns what it printed."""
    result = run([*COMMAND, *map(str, arguments)])
    assert result.returncode == 0, result.stderr
    return result.stdout


def started(command, cwd=None, **more):
    """A command that has been started; errors are in its output unless ``stderr`` says otherwise."""
    more = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **more}
    return subprocess.Popen([*map(str, command)], cwd=cwd, env=environment(), text=True, **more)


def lines_of(folder):
    """The whole lines of ``metrics.jsonl`` so far."""
    path, found = folder / "metrics.jsonl", []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def losses_of(folder):
    """Every loss of a run, by step and kind."""
    lines = lines_of(folder)
    return {(line["step"], kind): line[kind] for line in lines for kind in ("loss", "val_loss") if kind in line}


def processes_of(launcher):
    """The processes that ``launcher`` has started, and their children."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == launcher and b"resource_tracker" not in (entry / "cmdline").read_bytes():
                found += [int(entry.name), *processes_of(int(entry.name))]
    return found
