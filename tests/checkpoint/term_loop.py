"""Stop a training run with SIGTERM at random moments, again and again: no finished step may be lost.

    python -m tests.checkpoint.term_loop --signals 50 --seed 0

A *life* is a run with up to four signals, each to one rank or to all, at a random time after training began. After
each, all ranks must end with status 75 after the same step, which must be the newest checkpoint, whole, and the last
step that any rank has finished. The last start must end with the weights of a run that was never stopped, bit for bit.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from fairshard.checkpoint.preemption import STATUS
from tests.checkpoint.kill_loop import LONGEST_DELAY_S, AnyTime, Broken, Life
from tests.checkpoint.killed_run import EVERY, WORLD_SIZE, Run

MOST_SIGNALS = 4


class StoppedLife(Life):
    """One run in a folder, stopped and started again until it ends."""

    def start(self, term=None):
        """Run to the end or to ``term``, an `AnyTime`, then check what must hold; returns the `Ending`."""
        newest = self._newest()
        ending = self._play(term)
        if set(ending.values("resumed")) != {str(newest)}:
            raise Broken(f"it resumed from {ending.values('resumed')}, but the newest checkpoint is {newest}")
        if ending.is_final and set(ending.codes) == {0}:
            return ending
        if set(ending.codes) != {STATUS}:
            raise Broken(f"the ranks ended with {ending.codes}, and noted {[own[-1] for own in ending.notes]}")
        finished = {max(int(note.split()[1]) for note in own if note.startswith("step ")) for own in ending.notes}
        stopped = {int(step) for step in ending.values("stopped")}
        if not finished == stopped == {self._newest()}:
            raise Broken(f"finished {finished}, stopped after {stopped}, but the newest checkpoint is {self._newest()}")
        return ending


class Loop:
    """Lives, one after another; prints a line for each signal."""

    def __init__(self, folder, seed):
        self._folder = folder
        self._seed = seed
        self._finals = {}
        self.num_lives = self.num_late = self.num_between = 0
        self.victims = Counter()
        self.seconds = []

    @property
    def num_stops(self):
        """Number of signals that have stopped a run."""
        return self.victims.total()

    def live(self, num_signals):
        """Run one life that is stopped up to ``num_signals`` times."""
        seed = f"{self._seed}-{self.num_lives}"
        chance = random.Random(seed)
        async_save, cpu_offload = self.num_lives % 2 == 0, chance.random() < 0.5
        self.num_lives += 1
        folder = self._folder / f"life-{seed}"
        folder.mkdir()
        life = StoppedLife(folder, Run(str(folder / "root"), "", "", async_save, cpu_offload, stops=True))
        try:
            for _ in range(num_signals):
                term = AnyTime(chance.uniform(0, LONGEST_DELAY_S), chance.choice((0, 1, None)), signal.SIGTERM)
                ending = life.start(term)
                if ending.is_final:
                    self.num_late += 1
                    break
                self._count(ending, term, seed)
            else:
                ending = life.start()
            if set(ending.values("final")) != {self._final(cpu_offload)}:
                raise Broken("the weights at the end are not those of the run that was not stopped")
        except Broken as problem:
            raise Broken(f"seed {seed}: {problem}; see {folder}") from None
        shutil.rmtree(folder)

    def _final(self, cpu_offload):
        if cpu_offload not in self._finals:
            folder = self._folder / f"unbroken-{cpu_offload}"
            folder.mkdir()
            (found,) = set(Life(folder, Run(None, "", "", False, cpu_offload)).start().values("final"))
            self._finals[cpu_offload] = found
        return self._finals[cpu_offload]

    def _count(self, ending, term, seed):
        victims = "all ranks" if term.rank is None else f"rank {term.rank}"
        step = int(ending.values("stopped")[0])
        self.victims[victims] += 1
        self.num_between += step % EVERY != 0
        self.seconds.append(ending.stopped_s)
        print(
            f"signal {self.num_stops}: seed {seed}, {victims}; all ranks saved step {step} and ended after "
            f"{ending.stopped_s:.2f} s",
            flush=True,
        )

    def summary(self):
        """The result of all lives in a few lines."""
        counted = ", ".join(f"{name}: {number}" for name, number in self.victims.items())
        return "\n".join(
            [
                f"{self.num_stops} signals in {self.num_lives} lives ({counted}): all {WORLD_SIZE} ranks ended with "
                f"status {STATUS} after the same step; no finished step was lost, and every life ended with the "
                "unbroken run's bits.",
                f"{self.num_between} stops at a step that is not saved otherwise; {self.num_late} signals came after "
                "the last step.",
                f"From the signal to the end: at most {max(self.seconds):.2f} s, "
                f"{sum(self.seconds) / len(self.seconds):.2f} s on average.",
            ]
        )


def main():
    """Run the loop; exit code 1 when something broke."""
    parser = argparse.ArgumentParser(description="Stop a training run with SIGTERM again and again.")
    parser.add_argument("--signals", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    folder = Path(tempfile.mkdtemp(prefix="fairshard-term-"))
    loop = Loop(folder, args.seed)
    began = time.monotonic()
    try:
        while loop.num_stops < args.signals:
            loop.live(min(MOST_SIGNALS, args.signals - loop.num_stops))
    except Broken as problem:
        sys.exit(f"broken: {problem}")
    print(loop.summary())
    print(f"{time.monotonic() - began:.0f} s")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
