"""Train for thousands of steps with saves, validations and one resume: what a process holds must not grow.

    python -m tests.checkpoint.soak --steps 5000

It runs ``fairshard train`` on two ranks and looks at its processes in ``/proc`` from outside, several times a second:
memory (anonymous pages), open descriptors and threads. In the middle a rank is killed, and
``--max-restarts`` starts both again, so there are two *lives*. In each life, once it has settled, the last third is
compared with the first: the median of the memory, and the lowest number of descriptors and of threads, which saves
raise for a moment. It ends with code 1 if any of these has grown.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import fairshard
from tests.forked import children_of

RANKS = 2
OPTIONS = "--layers 2 --dim 32 --heads 2 --context 16 --batch-size 4 --eval-every 100 --save-every 50"
SETTLED_AFTER = 0.2
"""The part of a life that is not compared: caches fill, and the allocator finds its size."""
ALLOWED_NBYTES = 1 << 20
POLL_S = 0.1
TAIL_NBYTES = 4096


class Broken(Exception):
    """The run failed."""


@dataclass(frozen=True)
class Sample:
    """What one process holds after a step of the run."""

    step: int
    nbytes: int
    num_descriptors: int
    num_threads: int


@dataclass(frozen=True)
class Growth:
    """How much more a process holds in the last third of its settled life than in the first."""

    nbytes: float
    num_descriptors: int
    num_threads: int

    @property
    def problems(self):
        """One phrase for each kind of growth."""
        found = []
        if self.nbytes > ALLOWED_NBYTES:
            found.append(f"memory by {self.nbytes / 1e6:.2f} MB")
        for number, what in ((self.num_descriptors, "descriptors"), (self.num_threads, "threads")):
            if number > 0:
                found.append(f"{what} by {number}")
        return found


def growth_of(samples):
    """The growth over a life's samples, which are in order of time."""
    settled = samples[int(len(samples) * SETTLED_AFTER) :]
    third = len(settled) // 3
    if third < 3:
        raise Broken(f"{len(samples)} samples of a process are too few to see a trend")
    first, last = settled[:third], settled[-third:]

    def lowest(name):
        return min(getattr(sample, name) for sample in last) - min(getattr(sample, name) for sample in first)

    nbytes = [statistics.median(sample.nbytes for sample in part) for part in (first, last)]
    return Growth(nbytes[1] - nbytes[0], lowest("num_descriptors"), lowest("num_threads"))


class Soak:
    """One run in ``folder``, watched; ``lives[life][name]`` are the samples of a process."""

    def __init__(self, folder, num_steps, options):
        self._out = folder / "run"
        self._num_steps = num_steps
        command = [sys.executable, "-m", "fairshard.cli.main", "train", "--out", str(self._out), *options]
        self._log = (folder / "log").open("w+")
        paths = {"PYTHONPATH": str(Path(fairshard.__file__).parents[1])}
        self._process = subprocess.Popen(
            [*command, "--steps", str(num_steps), "--max-restarts", "1"],
            env={**os.environ, **paths},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self.lives = [{}, {}]

    def watch(self):
        """Sample until the run ends; kill a rank in the middle.

        Raises:
            Broken: the run failed.
        """
        kill_at = self._num_steps // 2
        killed, killed_at = [], 0
        while self._process.poll() is None:
            step, ranks = self._last_step(), children_of(self._process.pid)
            ranks = [rank for rank in ranks if rank not in killed]
            # After the kill this stays the last step until the run has resumed; after the last step ranks leave.
            if len(ranks) == RANKS and step not in (0, killed_at, self._num_steps):
                self._sample(step, ranks, 1 if killed else 0)
                if not killed and step >= kill_at:
                    killed, killed_at = ranks, step
                    os.kill(ranks[-1], signal.SIGKILL)
            time.sleep(POLL_S)
        self._log.seek(0)
        printed = self._log.read()
        resumed = re.search(r"resumed after step (\d+)", printed)
        if self._process.returncode or resumed is None:
            raise Broken(f"the run ended with {self._process.returncode}:\n{printed[-2000:]}")
        if self._last_step() != self._num_steps:
            raise Broken(f"the run ended at step {self._last_step()}")
        return int(resumed[1])

    def _sample(self, step, ranks, life):
        names = ["launcher", *(f"rank {rank}" for rank in range(RANKS))]
        for name, pid in zip(names, [self._process.pid, *ranks], strict=True):
            with contextlib.suppress(OSError):
                self.lives[life].setdefault(name, []).append(sample_of(pid, step))

    def _last_step(self):
        """The last step in ``metrics.jsonl``; 0 before the first."""
        try:
            with (self._out / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_NBYTES))
                steps = re.findall(rb'\{"step": (\d+), "loss"', file.read())
        except OSError:
            return 0
        return int(steps[-1]) if steps else 0

    def problems(self):
        """One sentence for each process that has grown."""
        found = []
        for life, processes in enumerate(self.lives, start=1):
            for name, samples in processes.items():
                grown = growth_of(samples).problems
                if grown:
                    found.append(f"{name} has grown in life {life}: {', '.join(grown)}")
        return found

    def lines(self):
        """A table of what the processes hold and by how much it changes."""
        counts = f"{'descriptors':>12} {'change':>7} {'threads':>8} {'change':>7}"
        yield f"{'':18} {'samples':>8} {'MB':>8} {'change':>8} {counts}"
        for life, processes in enumerate(self.lives, start=1):
            for name, samples in processes.items():
                grown, half = growth_of(samples), samples[len(samples) // 2 :]
                yield (
                    f"life {life}, {name:10} {len(samples):8} {statistics.median(s.nbytes for s in half) / 1e6:8.1f} "
                    f"{grown.nbytes / 1e6:+8.2f} {min(s.num_descriptors for s in half):12} {grown.num_descriptors:+7} "
                    f"{min(s.num_threads for s in half):8} {grown.num_threads:+7}"
                )


def sample_of(pid, step):
    """What the process ``pid`` holds now.

    Raises:
        OSError: it has ended.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    nbytes = 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1])
    return Sample(step, nbytes, len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")))


def main():
    """Run, print the table, and end with code 1 if anything has grown."""
    parser = argparse.ArgumentParser(description="Train for long: nothing may grow.")
    parser.add_argument("--steps", type=int, default=5000)
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    folder = Path(tempfile.mkdtemp(prefix="fairshard-soak-"))
    began = time.monotonic()
    try:
        soak = Soak(folder, args.steps, f"--nproc {RANKS} --device cpu {OPTIONS}".split())
        resumed = soak.watch()
        print("\n".join(soak.lines()))
        problems = soak.problems()
    except Broken as problem:
        sys.exit(f"broken: {problem}; see {folder}")
    if problems:
        sys.exit(f"broken: {'; '.join(problems)}; see {folder}")
    print(f"{args.steps} steps, resumed after step {resumed}: nothing grows. {time.monotonic() - began:.0f} s")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
