"""Runs every case on both engines and writes docs/notes/clients.md: ``python -m tests.clients.table [NAME ...]``."""

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.clients.case import ENGINES

ROOT = Path(__file__).parents[2]
PROGRAMS = ("accelerate_runs",)
TIMEOUT = 400.0


def cases():
    """All cases, in the order of the table."""
    modules = [importlib.import_module(f"tests.clients.{name}") for name in PROGRAMS]
    return [case for module in modules for case in module.CASES]


def case_named(name):
    """The case of that name."""
    return next(case for case in cases() if case.name == name)


def run_case(case, engine):
    """``(curve or None, seconds, last line of the error)`` of one run on fresh processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), GLOO_SOCKET_IFNAME="lo", PYTHONHASHSEED="0")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "curve.json"
        ranks = []
        for rank in range(case.world_size):
            command = [sys.executable, "-m", "tests.clients.rank", case.name, engine]
            command += [str(rank), str(case.world_size), str(port), str(out)]
            log = (Path(folder) / f"{rank}.log").open("w")
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log))
        try:
            while any(rank.poll() is None for rank in ranks):
                if any(rank.poll() for rank in ranks):
                    time.sleep(5)  # let the others report what they saw
                    break
                if time.perf_counter() - began > TIMEOUT:
                    break
                time.sleep(0.2)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        seconds = time.perf_counter() - began
        if out.exists() and not any(rank.returncode for rank in ranks):
            return json.loads(out.read_text()), seconds, ""
        logs = [(Path(folder) / f"{rank}.log").read_text() for rank in range(case.world_size)]
        if "FAIRSHARD_CLIENT_LOGS" in os.environ:
            sys.stderr.write("\n".join(log[-6000:] for log in logs))
        return None, seconds, _error(logs)


def _error(logs):
    for log in logs:
        lines = [line for line in log.splitlines() if "Error" in line and not line.startswith(" ")]
        if lines:
            return lines[-1]
    return "no rank reported an error in time"


def outcome(case, ours, theirs):
    """What the row says of the two curves."""
    if ours is None:
        return "does not run"
    if ours["seen"] not in ("", "fairshard"):
        return f"trained on {ours['seen']}"
    if theirs is None:
        return "runs; torch's engine does not"
    if theirs["seen"] not in ("", "torch"):
        return f"the comparison trained on {theirs['seen']}"
    pairs = [*zip(ours["losses"], theirs["losses"]), *zip(ours["norms"], theirs["norms"])]
    if len(ours["losses"]) != len(theirs["losses"]) or not pairs:
        return "other steps"
    worst = max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)
    if worst == 0:
        return "equal to the bit"
    return f"{'equal' if worst <= case.rtol else 'DIFFERS'} within {worst:.0e}"


def main(names):
    chosen = [case for case in cases() if not names or any(name in case.name for name in names)]
    rows = []
    for case in chosen:
        found = {engine: run_case(case, engine) for engine in ENGINES}
        said = outcome(case, found["fairshard"][0], found["torch"][0])
        rows.append((case, found, said))
        print(f"{case.name}: {said}", *(f"{engine} {found[engine][1]:.0f} s" for engine in ENGINES), flush=True)
        for engine in ENGINES:
            curve, _, error = found[engine]
            print("   ", engine, error or f"{curve['losses']} {curve['norms']}", flush=True)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
