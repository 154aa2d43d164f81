"""All cases, a run of one on either engine in fresh processes, and what two runs say."""

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = ("accelerate_runs", "trainer_runs", "lightning_runs", "optimizer_runs", "parallel_runs", "titan_runs")
TIMEOUT = 400.0


def cases():
    """All cases, in the order of the table."""
    modules = [importlib.import_module(f"tests.clients.{name}") for name in PROGRAMS]
    return [case for module in modules for case in module.CASES]


def case_named(name):
    """The case of that name."""
    return next(case for case in cases() if case.name == name)


@dataclass
class Run:
    """One run of a case: its curve, or the last line of the error."""

    curve: dict | None
    seconds: float
    error: str = ""


def run_program(name, engine, world_size, environ=None):
    """Run a case on fresh processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "curve.json"
        ranks = []
        for rank in range(world_size):
            command = [sys.executable, "-m", "tests.clients.rank", name, engine]
            command += [str(rank), str(world_size), str(port), str(out)]
            with (Path(folder) / f"{rank}.log").open("w") as log:
                everything = {**os.environ, **own, **(environ or {})}
                ranks.append(subprocess.Popen(command, cwd=ROOT, env=everything, stdout=log, stderr=log))
        _wait(ranks, began + TIMEOUT)
        seconds = time.perf_counter() - began
        if out.exists() and not any(rank.returncode for rank in ranks):
            return Run(json.loads(out.read_text()), seconds)
        logs = [(Path(folder) / f"{rank}.log").read_text() for rank in range(world_size)]
        if "FAIRSHARD_CLIENT_LOGS" in os.environ:
            sys.stderr.write("\n".join(log[-6000:] for log in logs))
        return Run(None, seconds, _error(logs))


def _wait(ranks, until):
    """Wait for all ranks; end the others soon after one fails, and all at ``until``."""
    while any(rank.poll() is None for rank in ranks) and time.perf_counter() < until:
        if any(rank.poll() for rank in ranks):
            until = min(until, time.perf_counter() + 5)
        time.sleep(0.2)
    for rank in ranks:
        rank.kill()
        rank.wait()


def _error(logs):
    for log in logs:
        lines = [line for line in log.splitlines() if "Error" in line and not line.startswith(" ")]
        if lines:
            return lines[-1]
    return "no rank reported an error in time"


def outcome(case, ours, theirs):
    """What the row says of the two runs."""
    if ours.curve is None:
        return "does not run" + ("" if theirs.curve else "; nor does torch's engine")
    if ours.curve["seen"] != "fairshard":
        return f"trained on {ours.curve['seen']}"
    if theirs.curve is None:
        return "runs; torch's engine does not"
    if theirs.curve["seen"] != "torch":
        return f"the comparison trained on {theirs.curve['seen']}"
    kinds = [(ours.curve[kind], theirs.curve[kind]) for kind in ("losses", "norms")]
    if any(len(a) != len(b) for a, b in kinds) or not ours.curve["losses"]:
        return "DIFFERS in its number of steps"
    worst = max(abs(a - b) / max(abs(b), 1e-12) for pair in kinds for a, b in zip(*pair, strict=True))
    if worst == 0:
        return "equal to the bit"
    return f"{'equal' if worst <= case.rtol else 'DIFFERS'} within {worst:.0e}"
