"""Run one engine once, in fresh processes, and bring back what each rank measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


class RunFailed(RuntimeError):
    """A rank failed or took too long; the message is the last line that it wrote."""


def launch(
    script: str, job: Mapping[str, Any], world: int, timeout_s: float, tree: Path | None = None
) -> list[dict[str, Any]]:
    """Run ``script`` on ``world`` ranks of a gloo group on this machine and return one result a rank.

    fairshard comes from ``tree``; without one, from the checkout that this file is in, whatever is installed.
    Each rank is handed ``job`` as JSON, with its ``rank``, the ``store`` to meet at and the path of its
    ``result``. What the ranks print (torch's warnings, mostly) is shown only as the reason of a failure.
    """
    with tempfile.TemporaryDirectory(prefix="fairshard-bench-") as folder:
        jobs = [
            {**job, "rank": rank, "store": f"{folder}/store", "result": f"{folder}/rank{rank}.json"}
            for rank in range(world)
        ]
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(world)]
        ranks = [_start(script, *pair, tree) for pair in zip(jobs, logs, strict=True)]
        try:
            failed = _wait(ranks, timeout_s)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if failed is not None:
            raise RunFailed(_reason(logs[failed], ranks[failed].returncode))
        return [json.loads(Path(job["result"]).read_text()) for job in jobs]


def _start(script: str, job: Mapping[str, Any], log: Path, tree: Path | None) -> subprocess.Popen[bytes]:
    paths = [str(tree or HERE.parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        # A rank must not look for its peers beyond this machine, nor take the other rank's core.
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(job["threads"]),
        # Warnings are work on the host, and some peers raise torch's deprecation warnings all the time.
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
