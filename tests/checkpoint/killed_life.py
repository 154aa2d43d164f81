"""Lives: runs that are killed or stopped, and started again, until they end; and what must hold in between.

This process forks the ranks, so torch is imported only once; it starts no threads.
"""

import argparse
import functools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

from tests.checkpoint.kill_points import Kill
from tests.checkpoint.killed_run import Run, play
from tests.forked import fork

LIMIT_S = 90.0
LONGEST_DELAY_S = 1.0
ANY_TIME = "any time in a save"


class Broken(Exception):
    """Something that must hold after a kill does not."""


@dataclass(frozen=True)
class AnyTime:
    """Kill ``rank``, or all ranks if it is None, ``delay_s`` after training began; or send another signal."""

    delay_s: float
    rank: int | None
    number: int = signal.SIGKILL


@dataclass(frozen=True)
class Ending:
    """How a run ended: each rank's exit code (-9 if killed) and notes.

    ``survived_s``: how long survivors took to exit; ``stopped_s``: how long all ranks took after a signal.
    """

    run: Run
    codes: tuple[int, ...]
    notes: tuple[tuple[str, ...], ...]
    survived_s: float
    stopped_s: float = 0.0

    @property
    def killed(self):
        """The ranks that were killed."""
        return [rank for rank, code in enumerate(self.codes) if code == -signal.SIGKILL]

    @property
    def is_final(self):
        """Whether every rank finished training."""
        return all(any(note.startswith("final") for note in own) for own in self.notes)

    def values(self, word):
        """What any rank noted after ``word``."""
        return [note.removeprefix(f"{word} ") for own in self.notes for note in own if note.startswith(f"{word} ")]

    @property
    def point(self):
        """Point of the save at which the kill came; None outside."""
        if self.values("kill"):
            return self.values("kill")[0]
        notes = [note for note in self.notes[0] if note.startswith("save ")]
        return ANY_TIME if notes and notes[-1].endswith("begins") else None

    @property
    def durable(self):
        """Last step whose save any rank finished, or 0."""
        done = [text for text in self.values("save") if text.endswith("ends")]
        return max((int(text.split()[0]) for text in done), default=0)


class Life:
    """One run in ``folder``, restarted until it ends."""

    def __init__(self, folder, kind):
        folder.mkdir(parents=True)
        self.folder = folder
        self.kind = kind
        self.world_sizes = []
        self._durable = 0

    @property
    def root(self):
        """Folder of its checkpoints."""
        return self.folder / "root"

    def start(self, world_size, kill=None, saves=True):
        """Run to the end or to ``kill`` (a `Kill` or an `AnyTime`), then check what must hold; returns the `Ending`."""
        newest = self.newest()
        ending = self.play(world_size, kill, saves)
        resumed = ending.values("resumed")
        if set(resumed) != {str(newest)} or len(resumed) != world_size:
            raise Broken(f"it resumed from {resumed}, but the newest durable step is {newest}")
        for rank, code in enumerate(ending.codes):
            if code == 0 and not any(note.startswith("final") for note in ending.notes[rank]):
                raise Broken(f"rank {rank} ended as if all was well")
            if code != 0 and not ending.killed:
                raise Broken(f"rank {rank} failed with {code}, though none was killed")
        self._durable = max(self._durable, ending.durable)
        if saves and (self.newest() or 0) < self._durable:
            raise Broken(f"step {self._durable} was saved, but the newest is {self.newest()}")
        return ending

    def newest(self):
        """The newest step; None if there is none. Every checkpoint under its final name must be complete."""
        steps = {path.name: self._checked(path) for path in self.root.glob("step-*")}
        pointer = self.root / "latest"
        return steps[pointer.read_text().strip()] if pointer.exists() else max(steps.values(), default=None)

    def _checked(self, path):
        """The step of the checkpoint ``path``, compared byte by byte with its manifest."""
        manifest, step = json.loads((path / "fairshard.json").read_text()), int(path.name.split("-")[1])
        for file, entry in manifest["files"].items():
            data = (path / file).read_bytes()
            if (len(data), zlib.crc32(data)) != (entry["nbytes"], entry["crc32"]):
                raise Broken(f"{path.name}/{file} is not what was written")
        num_ranks = len(manifest["files"]) - 1  # and .metadata
        if manifest["step"] != step or manifest["world_size"] != num_ranks or num_ranks not in self.world_sizes:
            raise Broken(f"{path.name} has the manifest {manifest}")
        return step

    def play(self, world_size, kill=None, saves=True):
        """Run to the end or to ``kill``; returns the `Ending`."""
        self.world_sizes.append(world_size)
        inside = kill if isinstance(kill, Kill) else None
        run = Run(self.kind, world_size, str(self.folder), len(self.world_sizes), saves, inside)
        notes = Path(run.path("notes"))
        notes.touch()
        pids = [fork(functools.partial(play, rank, run)) for rank in range(world_size)]
        codes = {}
        kill_at = died_at = sent_at = None
        gives_up_at = time.monotonic() + LIMIT_S
        while len(codes) < world_size:
            now = time.monotonic()
            for rank, pid in enumerate(pids):
                if rank not in codes:
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        codes[rank] = os.waitstatus_to_exitcode(status)
                        died_at = died_at or now
            if isinstance(kill, AnyTime):
                if kill_at is None and notes.read_text().count(" resumed ") == world_size:
                    kill_at = now + kill.delay_s
                if kill_at is not None and now >= kill_at:
                    for rank, pid in enumerate(pids):
                        if rank not in codes and kill.rank in (None, rank):
                            os.kill(pid, kill.number)
                    kill, sent_at = None, now
            if now > gives_up_at:
                hung = [rank for rank in range(world_size) if rank not in codes]
                for rank in hung:
                    os.kill(pids[rank], signal.SIGKILL)
                    os.waitpid(pids[rank], 0)
                raise Broken(f"ranks {hung} hung")
            time.sleep(0.002)
        lines = [line.split(maxsplit=1) for line in notes.read_text().splitlines()]
        by_rank = tuple(tuple(text for own, text in lines if own == str(rank)) for rank in range(world_size))
        ended_at = time.monotonic()
        codes = tuple(codes[rank] for rank in range(world_size))
        return Ending(run, codes, by_rank, ended_at - died_at, ended_at - (sent_at or ended_at))


class Lives:
    """Lives, one after another; a subclass says what happens in one."""

    def __init__(self, folder, seed):
        self._folder = folder
        self._seed = seed
        self._unbroken = {}
        self.num_lives = 0

    def live(self, most):
        """Run one life with at most so many kills or signals.

        Raises:
            Broken: something does not hold; the life's folder is kept.
        """
        seed = f"{self._seed}-{self.num_lives}"
        chance = random.Random(seed)
        life = self.born(self._folder / f"life-{seed}", chance)
        self.num_lives += 1
        try:
            self.pass_through(life, chance, most)
        except Broken as problem:
            raise Broken(f"seed {seed} ({life.kind}; ranks {life.world_sizes}): {problem}; see {life.folder}") from None
        shutil.rmtree(life.folder)

    def unbroken(self, kind, world_size):
        """The end of a run that saves nothing and is neither killed nor stopped."""
        key = kind.door, kind.cpu_offload, world_size
        if key not in self._unbroken:
            plain = type(kind)(kind.door, kind.cpu_offload)
            life = Life(self._folder / "-".join(map(str, ("unbroken", *key))), plain)
            self._unbroken[key] = life.start(world_size, saves=False)
        return self._unbroken[key]

    def check_bits(self, ending):
        """The weights, and every rank's random numbers, must be those of the run that was not killed or stopped."""
        expected = self.unbroken(ending.run.kind, ending.run.world_size)
        for word in ("final", "random"):
            if ending.values(word) != expected.values(word):
                raise Broken(f"at the end `{word}` is not that of the run that was not killed or stopped")


def run_lives(make, what, default, most_of_a_life):
    """The command line of a loop: ``make(folder, args)`` are `Lives`, whose ``num_done`` counts ``what`` up."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__.splitlines()[0])
    parser.add_argument(f"--{what}", type=int, default=default, dest="number")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    folder = Path(tempfile.mkdtemp(prefix=f"fairshard-{what}-"))
    lives = make(folder, args.seed)
    began = time.monotonic()
    try:
        while lives.num_done < args.number:
            lives.live(min(most_of_a_life, args.number - lives.num_done))
        print(lives.summary())
    except Broken as problem:
        sys.exit(f"broken: {problem}")
    print(f"{time.monotonic() - began:.0f} s")
    shutil.rmtree(folder)
