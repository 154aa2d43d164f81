"""Run one engine, or several in turns, in fresh processes, and bring back what each rank measured."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from models import MODELS

HERE = Path(__file__).resolve().parent


class RunFailed(RuntimeError):
    """A rank failed or took too long; the message is the last line that it wrote."""


class World(NamedTuple):
    """One engine's ranks: the job of each, and the source of fairshard: ``tree``, or by default this checkout."""

    job: Mapping[str, Any]
    tree: Path | None = None


def parser_of(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser of the options that all measurements of checkpoints have; ``defaults`` are some of them."""
    verbatim = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=verbatim)
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--world", type=int, default=2, help="ranks, all on this machine")
    parser.add_argument("--threads", type=int, default=1, help="threads of a rank")
    parser.add_argument("--repeat", type=int)
    parser.add_argument("--timeout", type=float, help="seconds after which it has failed")
    parser.add_argument("--folder", help="on the disk to measure (default: the system's temporary folder)")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/DATE-WHAT-MODEL-wWORLD.json")
    parser.set_defaults(**defaults)
    return parser


def launch(
    script: str, job: Mapping[str, Any], world: int, timeout_s: float, tree: Path | None = None
) -> list[dict[str, Any]]:
    """Run ``script`` on ``world`` ranks of a gloo group on this machine and return one result per rank.

    fairshard comes from ``tree``; without one, from the checkout that this file is in, whatever is installed.
    Each rank gets ``job`` as JSON, with its ``rank``, the ``store`` to meet at and the path of its ``result``.
    What the ranks print (torch's warnings, mostly) is shown only as the reason for a failure.
    """
    return launch_in_turns(script, [World(job, tree)], world, timeout_s)[0]


def launch_in_turns(script: str, worlds: Sequence[World], world: int, timeout_s: float) -> list[list[dict[str, Any]]]:
    """Run ``script`` for all ``worlds`` at the same time, as `launch` does; return one list of results for each.

    With several worlds each job also has a ``turn``: the pipe from which rank 0 reads a byte before each step, and the
    pipe to which it writes a byte after the step. So one world computes at a time, and a temporary slowdown of the
    machine affects all of them.
    """
    with tempfile.TemporaryDirectory(prefix="fairshard-bench-") as root:
        folders = [Path(root, str(number)) for number in range(len(worlds))]
        for folder in folders:
            folder.mkdir()
            os.mkfifo(folder / "turn")
        pipes = [str(folder / "turn") for folder in folders]
        first_turn = os.open(pipes[0], os.O_RDWR)  # held open: a pipe that no process has open loses its bytes
        os.write(first_turn, b".")
        ranks, logs, results = [], [], []
        for number, (folder, (job, tree)) in enumerate(zip(folders, worlds, strict=True)):
            if len(worlds) > 1:
                job = {**job, "turn": [pipes[number], pipes[(number + 1) % len(worlds)]]}
            for rank in range(world):
                result, log = folder / f"rank{rank}.json", folder / f"rank{rank}.log"
                own = {**job, "rank": rank, "store": f"{folder}/store", "result": str(result)}
                ranks.append(_start(script, own, log, tree))
                logs.append(log)
                results.append(result)
        try:
            failed = _wait(ranks, timeout_s)
        finally:
            os.close(first_turn)
            for process in ranks:
                process.kill()
                process.wait()
        if failed is not None:
            raise RunFailed(_reason(logs[failed], ranks[failed].returncode))
        measured = [json.loads(result.read_text()) for result in results]
        return [measured[start : start + world] for start in range(0, len(measured), world)]


def _start(script: str, job: Mapping[str, Any], log: Path, tree: Path | None) -> subprocess.Popen[bytes]:
    paths = [str(tree or HERE.parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        # A rank must not look for its peers beyond this machine, or use the other rank's core.
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(job["threads"]),
        # Warnings cost time on the host, and some peers raise torch's deprecation warnings all the time.
        "PYTHONWARNINGS": "ignore",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    command = [sys.executable, str(HERE / script), json.dumps(job)]
    with log.open("wb") as stream:
        return subprocess.Popen(command, env=environment, stdout=stream, stderr=subprocess.STDOUT)


def _wait(ranks: list[subprocess.Popen[bytes]], timeout_s: float) -> int | None:
    """Wait for all ranks; return the first that failed or was too slow. The others may hang because of it."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        codes = [rank.poll() for rank in ranks]
        for rank, code in enumerate(codes):
            if code:
                return rank
        if None not in codes:
            return None
        time.sleep(0.05)
    return next(rank for rank, process in enumerate(ranks) if process.poll() is None)


def _reason(log: Path, code: int) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1] if lines else "no output"
    return f"too slow: {last}" if code < 0 else last
