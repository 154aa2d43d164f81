"""Runs jobs on ranks of this machine, in fresh processes: one at a time, or several that take turns."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from models import MODELS

HERE = Path(__file__).resolve().parent


class RunFailed(RuntimeError):
    """A rank failed or took too long; the message is the last line that it wrote."""


@dataclass(frozen=True)
class Job:
    """What all ranks of one engine do."""

    worker: str
    """``file:function`` beside this file; called with a `rank.Rank` and ``settings``, it returns what JSON can hold."""
    settings: Mapping[str, Any]
    world: int = 2
    threads: int = 1
    device: str = "cpu"
    is_fake: bool = False
    """Whether the group is torch's fake one, of which one process is a rank."""
    tree: str = str(HERE.parent)
    """The folder of the fairshard that is measured; this checkout by default, whatever is installed."""
    timeout_s: float = 600


def run(*jobs: Job) -> list[list[Any]]:
    """Run all ``jobs`` at the same time; return what each rank of each measured.

    Several jobs compute one at a time: rank 0 reads a byte from a pipe before each step, and writes it to the pipe of
    the next job after the step, so a temporary slowdown of the machine affects all of them. What ranks print (torch's
    warnings, mostly) is shown only as the reason for a failure.
    """
    with tempfile.TemporaryDirectory(prefix="fairshard-bench-") as root:
        folders = [Path(root, str(number)) for number in range(len(jobs))]
        for folder in folders:
            folder.mkdir()
            os.mkfifo(folder / "turn")
        pipes = [str(folder / "turn") for folder in folders]
        first_turn = os.open(pipes[0], os.O_RDWR)  # held open: a pipe that no process has open loses its bytes
        os.write(first_turn, b".")
        ranks = []
        for number, (folder, job) in enumerate(zip(folders, jobs, strict=True)):
            turn = [pipes[number], pipes[(number + 1) % len(jobs)]] if len(jobs) > 1 else []
            ranks += [_Process(job, rank, folder, turn) for rank in range(job.world)]
        try:
            failed = _wait(ranks, max(job.timeout_s for job in jobs))
        finally:
            os.close(first_turn)
            for process in ranks:
                process.end()
        if failed is not None:
            raise RunFailed(failed.reason())
        measured = iter([json.loads(process.result.read_text()) for process in ranks])
        return [[next(measured) for _ in range(job.world)] for job in jobs]


def repeated(
    jobs: Mapping[str, Job], repeat: int, failures: dict[str, str], in_turns: bool = False
) -> Iterator[dict[str, Any]]:
    """Run each job once per repeat, so that other load on the machine affects all; yield a run of each.

    Each repeat starts with another job. A job that fails once is left out from then on and noted in ``failures``: a
    broken peer costs one timeout and stops nothing. Jobs that take turns fail together.
    """
    for number in range(repeat):
        first = number % len(jobs)
        names = [*list(jobs)[first:], *list(jobs)[:first]]
        if in_turns:
            for name, ranks in zip(names, run(*(jobs[name] for name in names)), strict=True):
                yield {"engine": name, "repeat": number, "ranks": ranks}
            continue
        for name in (name for name in names if name not in failures):
            try:
                (ranks,) = run(jobs[name])
            except RunFailed as error:
                failures[name] = str(error)
                print(f"{name}: failed: {error}", flush=True)
            else:
                yield {"engine": name, "repeat": number, "ranks": ranks}


def parser_of(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser of the options that all measurements have; ``defaults`` are some of them."""
    verbatim = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=verbatim)
    parser.add_argument("--model", choices=MODELS, default="gpt-29m")
    parser.add_argument("--device", default="cpu", help="type of the ranks' devices: cpu, cuda, xpu, ...")
    parser.add_argument("--world", type=int, help="ranks, all on this machine (default: 2 on cpu, 1 on an accelerator)")
    parser.add_argument("--threads", type=int, default=1, help="threads of a rank")
    parser.add_argument("--repeat", type=int, help="runs of each engine, interleaved")
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which a run has failed")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/DATE-WHAT-MODEL-wWORLD.json")
    parser.set_defaults(**defaults)
    return parser


def options_of(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options on the command line ``argv`` of a `parser_of`."""
    options = parser.parse_args(argv)
    options.world = options.world or (2 if options.device == "cpu" else 1)
    if min(options.world, options.repeat, options.threads) < 1:
        parser.error("--world, --repeat and --threads must be at least 1")
    return options


def names_in(parser: argparse.ArgumentParser, text: str, known: Iterable[str]) -> list[str]:
    """The names of a comma-separated list, all of which must be ``known``."""
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"unknown names {', '.join(unknown)}; there are {', '.join(known)}")
    return names


class _Process:
    """A rank that has been started."""

    def __init__(self, job: Job, rank: int, folder: Path, turn: list[str]):
        self.result, self._log = folder / f"rank{rank}.json", folder / f"rank{rank}.log"
        own = {**asdict(job), "rank": rank, "store": f"{folder}/store", "result": str(self.result), "turn": turn}
        paths = [job.tree, os.environ.get("PYTHONPATH", "")]
        environment = {
            # A rank must not look for its peers beyond this machine, or use the other rank's core.
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": str(job.threads),
            # Warnings cost time on the host, and some peers raise torch's deprecation warnings all the time.
            "PYTHONWARNINGS": "ignore",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }
        command = [sys.executable, str(HERE / "rank.py"), json.dumps(own)]
        with self._log.open("wb") as stream:
            self._process = subprocess.Popen(command, env=environment, stdout=stream, stderr=subprocess.STDOUT)

    @property
    def code(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """End it, and wait for its end."""
        self._process.kill()
        self._process.wait()

    def reason(self) -> str:
        """Why it has failed."""
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1] if lines else "no output"
        return f"too slow: {last}" if self._process.returncode < 0 else last


def _wait(ranks: list[_Process], timeout_s: float) -> _Process | None:
    """Wait for all ranks; return the first that failed or was too slow. The others may hang because of it."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        codes = [rank.code for rank in ranks]
        failed = next((rank for rank, code in zip(ranks, codes, strict=True) if code), None)
        if failed is not None or None not in codes:
            return failed
        time.sleep(0.05)
    return next(rank for rank in ranks if rank.code is None)
