"""Let ranks die, stop, diverge or run out of batches: the others must say which and where, exit, and resume.

    python -m tests.doors.wrapper.drill --times 20

A *round* is a run of three or five ranks that evaluates after every step, saves every second one, and meets one fault
in its fifth. Three ranks exchange rows under tags; five match collectives by their order alone, as NCCL does, so other
modules of the same shape are not noticed at once. The round must end within 15 s, with a backend timeout of 10 s (if a
rank is only stopped, 10 s later). Every surviving rank must raise an error
that names ranks and modules, with its parameters as they were after its last step. The run is then restarted, every
other time on one rank fewer, and must continue from the newest checkpoint to the end. On the same number of ranks its
weights must equal those of a run without a fault, bit for bit.

This process forks the ranks, so that torch is imported once. It starts no threads.
"""

import argparse
import functools
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tests.doors.wrapper.drill_run import DIVERGES, FAULT_STEP, FAULTS, KILLS, STOPS, Run, play
from tests.forked import fork

WORLD_SIZES = (3, 5)
LIMIT_S = 15.0


class Broken(Exception):
    """A requirement after a fault does not hold."""


@dataclass(frozen=True)
class Ending:
    """How a run ended: exit code (-9 if killed) and notes of each rank, and the seconds since the fault."""

    codes: tuple[int, ...]
    notes: tuple[tuple[str, ...], ...]
    seconds: float

    def value(self, rank, word):
        """The last text that ``rank`` noted after ``word``, or None."""
        found = [note.removeprefix(f"{word} ") for note in self.notes[rank] if note.startswith(f"{word} ")]
        return found[-1] if found else None


class Drill:
    """Runs rounds, and collects how long each took."""

    def __init__(self, folder, timeout_s=10.0):
        self._folder = folder
        self._timeout_s = timeout_s
        self._num_runs = self.num_rounds = 0
        self._final = {}  # by world size
        self.seconds = defaultdict(list)

    def round(self, fault, victim, world_size, fewer):
        """Run one fault of rank ``victim``, and the restart after it, on one rank fewer if ``fewer``."""
        root = self._folder / f"round-{self.num_rounds}"
        self.num_rounds += 1
        if world_size not in self._final:
            run = self._run(self._folder / f"unbroken-{world_size}", world_size)
            self._final[world_size] = self._play(run).value(0, "final")
        if fault == "other model":  # it fails at its first pass, so write a checkpoint first
            self._play(self._run(root, world_size, "one batch short", world_size - 1))
        try:
            ending = self._play(self._run(root, world_size, fault, victim))
            self._check(ending, fault, victim)
            self.seconds[fault].append(ending.seconds)
            self._restart(root, world_size - fewer)
        except Broken as problem:
            raise Broken(f"{fault}, rank {victim} of {world_size}: {problem}; see {self._folder}") from None
        shutil.rmtree(root)
        return ending

    def _check(self, ending, fault, victim):
        expected = -signal.SIGKILL if fault in KILLS else 0 if fault == "one batch short" else 1
        if ending.codes[victim] != expected:
            raise Broken(f"rank {victim} ended with {ending.codes[victim]}, not {expected}: {ending.notes[victim]}")
        # A stopped process keeps its connections open: the others learn of it from the backend's timeout only.
        if ending.seconds > LIMIT_S + (self._timeout_s if fault in STOPS else 0):
            raise Broken(f"it took {ending.seconds:.1f} s")
        for rank in range(len(ending.codes)):
            if rank != victim or fault in DIVERGES:
                self._check_survivor(ending, fault, victim, rank)

    def _check_survivor(self, ending, fault, victim, rank):
        error = ending.value(rank, "raised")
        if ending.codes[rank] != 1 or error is None:
            raise Broken(f"rank {rank} ended with {ending.codes[rank]}: {ending.notes[rank]}")
        if fault == "other model":
            wanted = [f"rank {victim} has" if victim else "rank 0 has", "head"]
        elif fault == "skips a step":
            wanted = [rf"The optimizer steps differ: .*\b{FAULT_STEP - 1} on rank {victim}\b"]
        elif fault == "other evaluation":
            wanted = [r"the gather of `blocks\.2`", r"the gather of `blocks\.3`"]
        elif fault == "other order":
            names = ["`blocks.1`", "`blocks.3`"] if victim else ["`blocks.3`", "`blocks.1`"]
            wanted = [rf"In step {FAULT_STEP} rank 0 is at {names[0]} \(forward\), rank \d at {names[1]} \(forward\)"]
        elif fault == "other module":
            names = [r"`blocks\.2`", r"`experts\.1`"] if victim else [r"`experts\.1`", r"`blocks\.2`"]
            wanted = [rf"In step {FAULT_STEP} rank 0 is at {names[0]} \(forward\), rank \d at {names[1]} \(forward\)"]
        else:
            silent = ["silent", "unknown"] if fault in KILLS else ["gone", "unknown", "silent"]
            listed = rf"ranks? [-\d, ]*: (?:{'|'.join(silent)})"
            wanted = [listed, rf"rank {rank}|ranks [-\d, ]*:", r"`blocks\.\d`|`root`|step"]
        for pattern in wanted:
            if not re.search(pattern, error):
                raise Broken(f"the error on rank {rank} does not match /{pattern}/: {error}")
        if fault != "other model" and ending.value(rank, "unchanged") != "True":
            raise Broken(f"the parameters of rank {rank} changed after its last step: {ending.notes[rank]}")

    def _restart(self, root, world_size):
        newest = max(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))
        ending = self._play(self._run(root, world_size))
        for rank in range(world_size):
            if ending.codes[rank] or ending.value(rank, "resumed") != str(newest):
                raise Broken(f"after the restart, rank {rank} ended with {ending.codes[rank]}: {ending.notes[rank]}")
        finals = {ending.value(rank, "final") for rank in range(world_size)}
        if finals != {self._final.get(world_size, *finals)}:
            raise Broken("after the restart, the weights differ from those of a run without a fault")

    def _run(self, root, world_size, fault=None, victim=0):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._num_runs += 1
        notes = self._folder / f"notes-{self._num_runs}"
        notes.touch()
        return Run(str(root), str(notes), port, world_size, self._timeout_s, fault, victim)

    def _play(self, run):
        began = time.monotonic()
        log = self._folder / f"log-{self._num_runs}"
        pids = [fork(functools.partial(play, rank, run, log)) for rank in range(run.world_size)]
        codes = {}
        while len(codes) < run.world_size:
            for rank, pid in enumerate(pids):
                if rank not in codes:
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        codes[rank] = os.waitstatus_to_exitcode(status)
            if run.fault in STOPS and len(codes) == run.world_size - 1:
                os.kill(pids[run.victim], signal.SIGKILL)
            if time.monotonic() - began > 4 * LIMIT_S:
                hung = [rank for rank in range(run.world_size) if rank not in codes]
                for rank in hung:
                    os.kill(pids[rank], signal.SIGKILL)
                    os.waitpid(pids[rank], 0)
                raise Broken(f"ranks {hung} hung")
            time.sleep(0.005)
        lines = [line.split(maxsplit=2) for line in Path(run.notes).read_text().splitlines()]
        by_rank = tuple(tuple(text for own, _, text in lines if own == str(rank)) for rank in range(run.world_size))
        faults = [float(at) for _, at, text in lines if text == "fault"]
        seconds = time.monotonic() - max(faults, default=began)
        return Ending(tuple(codes[rank] for rank in range(run.world_size)), by_rank, seconds)

    def summary(self):
        """A table of all rounds."""
        rows = [
            f"  {len(seconds):3} x {FAULTS[fault]}: over after {max(seconds):.1f} s at most"
            for fault, seconds in self.seconds.items()
        ]
        return "\n".join([f"{self.num_rounds} rounds; every restart went on from the newest checkpoint:", *rows])


def main():
    """Run the drill; exit code 1 when something broke."""
    parser = argparse.ArgumentParser(description="Let ranks of a training run fail in every way.")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=10.0, help="of the backend, in seconds")
    parser.add_argument("--world-sizes", nargs="*", type=int, default=WORLD_SIZES, help="in turn")
    parser.add_argument("--faults", nargs="*", choices=list(FAULTS), default=list(FAULTS))
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    folder = Path(tempfile.mkdtemp(prefix="fairshard-drill-"))
    drill = Drill(folder, args.timeout)
    try:
        for time_ in range(args.times):
            for number, fault in enumerate(args.faults):
                world_size = args.world_sizes[time_ % len(args.world_sizes)]
                if fault == "other module" and world_size > 4:
                    continue  # one gather more, so gloo ends a process that receives a message of another size
                victim = (time_ + number) % world_size
                ending = drill.round(fault, victim, world_size, fewer=time_ // len(args.world_sizes) % 2 == 1)
                done = f"round {drill.num_rounds}: {fault}, rank {victim} of {world_size}"
                print(f"{done}: over after {ending.seconds:.1f} s", flush=True)
    except Broken as problem:
        sys.exit(f"broken: {problem}")
    print(drill.summary())
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
