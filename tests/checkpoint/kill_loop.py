"""Kill a training run, start it again, kill it again, ...: it must end as if nothing had happened.

    python -m tests.checkpoint.kill_loop --kills 200 --seed 0

A *life* is a run with up to four kills. After each kill the folder must hold a complete checkpoint, no older than the
last save that any rank finished; the next start must resume from it; and the last start must end with the weights of a
run that was never killed, bit for bit. A run that waits for its last save or just exits must leave only the newest
checkpoints; a run that destroys the process group during its last save must still end.

Half of the kills are at a named point inside a save (`killed_run.POINTS`, in turn), the others at a random time. This
process forks the ranks, so torch is imported only once; it starts no threads.
"""

import argparse
import functools
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import zlib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from tests.checkpoint.killed_run import ANY_RANK, EVERY, KEEP_LAST, NUM_STEPS, POINTS, WORLD_SIZE, Kill, Run, play
from tests.forked import fork

MOST_KILLS = 4
LIMIT_S = 90.0
LONGEST_DELAY_S = 1.0


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
        """Point of the save at which the kill came; None outside a save."""
        if self.values("kill"):
            return self.values("kill")[0]
        saves = [note for note in self.notes[0] if note.startswith("save ")]
        return "at any time" if saves and saves[-1].endswith("begins") else None

    @property
    def durable(self):
        """Last step whose save any rank finished, or 0."""
        return max((int(text.split()[0]) for text in self.values("save") if text.endswith("ends")), default=0)


class Life:
    """One run in ``folder``, restarted until it ends."""

    def __init__(self, folder, run):
        self._folder = folder
        self._run = run
        self._num_starts = 0
        self._durable = 0

    @property
    def root(self):
        """Folder of its checkpoints."""
        return Path(self._run.root)

    def start(self, kill=None):
        """Run to the end or to ``kill`` (a `Kill` or an `AnyTime`), then check what must hold."""
        newest = None if self._run.root is None else self._newest()
        ending = self._play(kill)
        if ending.values("resumed") and set(ending.values("resumed")) != {str(newest)}:
            raise Broken(f"it resumed from {ending.values('resumed')}, but the newest durable step is {newest}")
        for rank, code in enumerate(ending.codes):
            if code == 0 and not any(note.startswith("final") for note in ending.notes[rank]):
                raise Broken(f"rank {rank} ended as if all was well")
            if code != 0 and not ending.killed:
                raise Broken(f"rank {rank} failed with {code}, though none was killed")
        self._durable = max(self._durable, ending.durable)
        if self._run.root is not None and (self._newest() or 0) < self._durable:
            raise Broken(f"step {self._durable} was saved, but the newest is {self._newest()}")
        return ending

    def _newest(self):
        """The step that a start must resume from. Every checkpoint under its final name must be complete."""
        steps = {path.name: int(path.name.removeprefix("step-")) for path in self.root.glob("step-*")}
        for name in steps:
            manifest = json.loads((self.root / name / "fairshard.json").read_text())
            for file, entry in manifest["files"].items():
                data = (self.root / name / file).read_bytes()
                if (len(data), zlib.crc32(data)) != (entry["nbytes"], entry["crc32"]):
                    raise Broken(f"{name}/{file} is not what was written")
            if manifest["step"] != steps[name] or len(manifest["files"]) != WORLD_SIZE + 1:
                raise Broken(f"{name} has the manifest {manifest}")
        pointer = self.root / "latest"
        return steps[pointer.read_text().strip()] if pointer.exists() else max(steps.values(), default=None)

    def _play(self, kill):
        number = self._num_starts = self._num_starts + 1
        notes, log = self._folder / f"notes-{number}", self._folder / f"log-{number}"
        notes.touch()
        inside = kill if isinstance(kill, Kill) else None
        run = replace(self._run, notes=str(notes), store=str(self._folder / f"store-{number}"), kill=inside)
        pids = [fork(functools.partial(play, rank, run, log)) for rank in range(WORLD_SIZE)]
        codes = {}
        kill_at = died_at = sent_at = None
        gives_up_at = time.monotonic() + LIMIT_S
        while len(codes) < WORLD_SIZE:
            now = time.monotonic()
            for rank, pid in enumerate(pids):
                if rank not in codes:
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        codes[rank] = os.waitstatus_to_exitcode(status)
                        died_at = died_at or now
            if isinstance(kill, AnyTime):
                if kill_at is None and notes.read_text().count(" resumed ") == WORLD_SIZE:
                    kill_at = now + kill.delay_s
                if kill_at is not None and now >= kill_at:
                    for rank, pid in enumerate(pids):
                        if rank not in codes and kill.rank in (None, rank):
                            os.kill(pid, kill.number)
                    kill, sent_at = None, now
            if now > gives_up_at:
                hung = [rank for rank in range(WORLD_SIZE) if rank not in codes]
                for rank in hung:
                    os.kill(pids[rank], signal.SIGKILL)
                    os.waitpid(pids[rank], 0)
                raise Broken(f"ranks {hung} hung")
            time.sleep(0.002)
        lines = [line.split(maxsplit=1) for line in notes.read_text().splitlines()]
        by_rank = tuple(tuple(text for own, text in lines if own == str(rank)) for rank in range(WORLD_SIZE))
        ended_at = time.monotonic()
        codes = tuple(codes[rank] for rank in range(WORLD_SIZE))
        return Ending(codes, by_rank, ended_at - died_at, ended_at - (sent_at or ended_at))


class Loop:
    """Lives, one after another; prints a line for each kill."""

    def __init__(self, folder, seed):
        self._folder = folder
        self._seed = seed
        self._turn = itertools.cycle(POINTS)
        self._finals = {}
        self.num_lives = 0
        self.points = Counter()
        self.victims = Counter()
        self.longest_s = 0.0

    @property
    def num_kills(self):
        """Number of kills so far."""
        return sum(self.victims.values())

    @property
    def num_inside(self):
        """Number of kills inside a save."""
        return self.num_kills - self.points[None]

    def live(self, num_kills):
        """Run one life with up to ``num_kills`` kills."""
        seed = f"{self._seed}-{self.num_lives}"
        chance = random.Random(seed)
        async_save, cpu_offload = self.num_lives % 2 == 0, chance.random() < 0.5
        kind = f"{'async' if async_save else 'sync'}{', offload' if cpu_offload else ''}"
        folder = self._folder / f"life-{seed}"
        end = ("wait", "exit", "destroy")[self.num_lives % 3]
        life = Life(_made(folder), Run(str(folder / "root"), "", "", async_save, cpu_offload, end))
        final = self._final(cpu_offload)
        self.num_lives += 1
        try:
            for kill in itertools.islice(self._kills(chance), num_kills):
                ending = life.start(kill)
                if ending.killed:
                    self._count(ending, f"seed {seed} ({kind})", life.root)
                if ending.is_final:
                    break
            else:
                ending = life.start()
            if set(ending.values("final")) != {final}:
                raise Broken("the weights at the end are not those of the run that was not killed")
            if not ending.killed and (end != "destroy" or not async_save):
                kept = [f"step-{step:08}" for step in range(NUM_STEPS, 0, -EVERY)][:KEEP_LAST]
                left = sorted(os.listdir(life.root))
                if left != sorted([*kept, "latest"]):
                    raise Broken(f"at the end there are {left}")
        except Broken as problem:
            raise Broken(f"seed {seed} ({kind}): {problem}; see {folder}") from None
        shutil.rmtree(folder)

    def _kills(self, chance):
        while True:
            point = next(self._turn)
            rank = chance.randrange(WORLD_SIZE) if point in ANY_RANK else 0
            who = chance.choice(("own", "other", "all"))
            if point == "set aside":  # needs a published step that `latest` does not name yet
                yield Kill("pointer", 2, 0, chance.choice(("own", "all")))
                yield Kill(point, 1, rank, who)
            else:
                yield Kill(point, chance.randint(1, 3), rank, who)
            yield AnyTime(chance.uniform(0, LONGEST_DELAY_S), chance.choice((0, 1, None)))

    def _final(self, cpu_offload):
        """Digest of the weights at the end of a run that saves nothing and is not killed."""
        if cpu_offload not in self._finals:
            folder = _made(self._folder / f"unbroken-{cpu_offload}")
            (found,) = set(Life(folder, Run(None, "", "", False, cpu_offload)).start().values("final"))
            self._finals[cpu_offload] = found
        return self._finals[cpu_offload]

    def _count(self, ending, of, root):
        point = ending.point
        victims = f"rank {ending.killed[0]}" if len(ending.killed) == 1 else "all ranks"
        self.points[point] += 1
        self.victims[victims] += 1
        self.longest_s = max(self.longest_s, ending.survived_s)
        where = "between steps" if point is None else f"inside a save, {POINTS.get(point, point)}"
        latest = (root / "latest").read_text().strip() if (root / "latest").exists() else "nothing"
        print(f"kill {self.num_kills}: {of}, {victims}, {where}; durable: {latest}", flush=True)

    def summary(self):
        """The result of all lives in a few lines."""
        inside = [f"  {self.points[point]:3} {text}" for point, text in POINTS.items() if self.points[point]]
        return "\n".join(
            [
                f"{self.num_kills} kills in {self.num_lives} lives ({', '.join(map(_counted, self.victims.items()))}): "
                "every start went on from the newest durable step, every life ended with the unbroken run's bits.",
                f"{self.num_inside} inside a save:",
                *inside,
                f"  {self.points['at any time']:3} at any time",
                f"Survivors ended with an error within {self.longest_s:.1f} s.",
            ]
        )


def _counted(item):
    return f"{item[0]}: {item[1]}"


def _made(folder):
    folder.mkdir(parents=True)
    return folder


def main():
    """Run the loop; exit code 1 when something broke."""
    parser = argparse.ArgumentParser(description="Kill a training run again and again.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    folder = Path(tempfile.mkdtemp(prefix="fairshard-kill-"))
    loop = Loop(folder, args.seed)
    began = time.monotonic()
    try:
        while loop.num_kills < args.kills:
            loop.live(min(MOST_KILLS, args.kills - loop.num_kills))
    except Broken as problem:
        sys.exit(f"broken: {problem}")
    print(loop.summary())
    missed = [text for point, text in POINTS.items() if not loop.points[point]]
    if missed and args.kills >= 100:
        sys.exit(f"broken: no kill {', '.join(missed)}")
    print(f"{time.monotonic() - began:.0f} s")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
