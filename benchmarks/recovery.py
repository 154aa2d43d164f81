"""What copies in memory cost, and how soon a run trains again after a rank was killed, beside restarts from disk.

    python benchmarks/recovery.py                               # gpt-29m, 2 ranks, about 6 minutes
    python benchmarks/recovery.py --model gpt-5m --repeat 1     # a quick check that everything runs

Two parts. *Copies*: ranks of one host, then of two simulated ones, copy, save and load (`recovery_worker.py`).
*Restarts*: ``fairshard train --max-restarts 1`` of a GPT of about the same size; a rank is killed after a given step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import record
import report
from launch import HERE, RunFailed, launch, parser_of
from models import MODELS

sys.path.insert(0, str(record.ROOT))

from tests.forked import children_of

SAVE_EVERY = 25
KILL_AFTER = 48
_POLL_S = 0.01


def copies_table(measured: dict[int, list[Any]]) -> str:
    """Stall, duration and memory of a copy, and what a step costs, by number of hosts."""
    table = [["", "stall ms", "disk save's stall ms", "then ms", "step ms", "step ms with copies", "MB", "peak MB"]]
    for hosts, ranks in measured.items():
        name = "1 host" if hosts == 1 else f"{hosts} hosts"
        cells = [_slowest_ms(ranks, "copies", "stall"), _slowest_save(ranks), _slowest_ms(ranks, "copies", "rest")]
        cells += [_slowest_ms(ranks, "steps", "plain"), _slowest_ms(ranks, "steps", "copied")]
        cells += [f"{max(copy[key] for rank in ranks for copy in rank['copies']) / 1e6:.0f}" for key in _SIZES]
        table.append([name, *cells])
    return report.table(table)


_SIZES = ("nbytes", "peak_nbytes")


def loads_table(measured: dict[int, list[Any]]) -> str:
    """Seconds of a load of the slowest rank, by source."""
    table = [["load, s", "memory", "one host lost", "disk", "disk, cached"]]
    for hosts, ranks in measured.items():
        lost = ""
        if "lost" in ranks[0]:
            lost = report.Spread.of(map(max, zip(*(rank["lost"] for rank in ranks), strict=True))).show(2)
        memory, disk, cached = (_slowest(ranks, "loads", kind).show(2) for kind in ("memory", "disk", "cached"))
        table.append([f"{hosts} host" + "s" * (hosts > 1), memory, lost, disk, cached])
    return report.table(table)


def _slowest(ranks: Sequence[Any], part: str, key: str, scale: float = 1) -> report.Spread:
    by_repeat = zip(*(rank[part] for rank in ranks), strict=True)
    return report.Spread.of(max(own[key] for own in each) * scale for each in by_repeat)


def _slowest_ms(ranks: Sequence[Any], part: str, key: str) -> str:
    return _slowest(ranks, part, key, 1e3).show(0)


def _slowest_save(ranks: Sequence[Any]) -> str:
    return report.Spread.of(1e3 * max(each) for each in zip(*(r["save_stall"] for r in ranks), strict=True)).show(0)


class Restart:
    """One run of ``fairshard train`` of which a rank is killed."""

    def __init__(self, folder: Path, train: Sequence[str]) -> None:
        self._out = folder / "run"

        self._resumed: int | None = None
        command = [sys.executable, "-m", "fairshard.cli.main", "train", *train]
        command += ["--out", str(self._out), "--max-restarts", "1"]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(HERE.parent)}
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            match = re.search(r"resumed after step (\d+)", line)
            if match:
                self._resumed = int(match[1])

    def measure(self) -> dict[str, float]:
        """Kill the last rank after step `KILL_AFTER`; returns the steps lost, and the seconds until it goes on."""
        self._wait(lambda: self._last_step() >= KILL_AFTER)
        killed = time.perf_counter()
        os.kill(max(children_of(self._process.pid)), signal.SIGKILL)
        self._wait(lambda: self._resumed is not None)
        resumed = time.perf_counter()
        assert self._resumed is not None
        first_step = self._resumed + 1
        self._wait(lambda: self._last_step() >= first_step)
        first = time.perf_counter()
        self._wait(lambda: self._last_step() > KILL_AFTER)
        back = time.perf_counter()
        self._process.send_signal(signal.SIGINT)
        self._process.wait()
        seconds = {"resumed": resumed - killed, "first": first - killed, "back": back - killed}
        return {"lost": KILL_AFTER - self._resumed, **seconds}

    def _last_step(self) -> int:
        with contextlib.suppress(OSError, ValueError, IndexError):
            lines = (self._out / "metrics.jsonl").read_text().splitlines()
            return int(json.loads(lines[-1])["step"])
        return 0

    def _wait(self, is_so: Any) -> None:
        while not is_so():
            if self._process.poll() is not None:
                raise RunFailed(f"the run ended with {self._process.returncode}")
            time.sleep(_POLL_S)


def restarts_table(restarts: dict[str, list[dict[str, float]]]) -> str:
    """Steps lost, and seconds from the kill, by kind of restart."""
    table = [["from", "steps lost", "s until loaded", "s until the first step", "s until the step of the kill"]]
    for name, found in restarts.items():
        cells = [report.Spread.of(one[key] for one in found).show(1) for key in ("resumed", "first", "back")]
        table.append([name, report.Spread.of(one["lost"] for one in found).show(0), *cells])
    return report.table(table)


def _train_options(model: str, world: int) -> list[str]:
    config = MODELS[model]
    sizes = f"--layers {config.num_blocks} --dim {config.dim} --heads {config.num_heads} --context 64"
    run = "--steps 1000 --eval-every 1000 --warmup 20"
    return shlex.split(f"--nproc {world} --device cpu {sizes} --batch-size {world} {run}")


def _restarts(options: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, float]]]:
    kinds = {
        f"disk, every {SAVE_EVERY}": ["--save-every", str(SAVE_EVERY)],
        f"memory, every {options.every}": ["--save-every", "0", "--memory-every", str(options.every)],
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for number in range(options.repeat):
        for name, flags in kinds.items():
            own = folder / f"{number}-{len(flags)}"
            own.mkdir()
            found[name].append(Restart(own, [*_train_options(options.model, options.world), *flags]).measure())
            _drop_copies(own / "run" / "checkpoints")
            shutil.rmtree(own)
    return found


def _drop_copies(checkpoints: Path) -> None:
    from measure import loaded_module  # here because it imports torch

    import fairshard.checkpoint  # noqa: F401

    module: Any = loaded_module("memory_folder", "memory_left")
    left = module.memory_left(str(checkpoints))
    if left is not None:
        shutil.rmtree(left)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, model="gpt-29m", repeat=5, timeout=900.0)
    parser.add_argument("--every", type=int, default=5, help="steps between copies")
    options = parser.parse_args(argv)
    options.out = options.out or record.result_file("recovery", options)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    measured: dict[int, list[Any]] = {}
    with tempfile.TemporaryDirectory(prefix="fairshard-bench-", dir=options.folder) as folder:
        for hosts in (1, options.world):
            with tempfile.TemporaryDirectory(prefix="fairshard-bench-", dir="/dev/shm") as memory:
                job = {key: getattr(options, key) for key in ("model", "world", "threads", "repeat", "every")}
                job = {**job, "hosts": hosts, "disk": f"{folder}/disk-{hosts}", "memory": memory}
                try:
                    measured[hosts] = launch("recovery_worker.py", job, options.world, options.timeout)
                except RunFailed as error:
                    raise SystemExit(f"error: {error}") from None
        restarts = _restarts(options, Path(folder))
    print(copies_table(measured) + "\n\n" + loads_table(measured) + "\n\n" + restarts_table(restarts))
    header = {**record.header(__file__, options, argv), "load": os.getloadavg()}
    runs = [{"hosts": hosts, "ranks": ranks} for hosts, ranks in measured.items()]
    runs += [{"restart": name, "found": found} for name, found in restarts.items()]
    record.write(options.out, header, runs=runs)
    print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
