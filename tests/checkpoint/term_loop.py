"""Stop a training run with SIGTERM at random moments, again and again: no finished step may be lost.

    python -m tests.checkpoint.term_loop --signals 50 --seed 0

A *life* is a run on two ranks with up to four signals, each to one rank or to all, at a random time after training
began. After each, all ranks must end with status 75 after the same step, which must be the newest checkpoint, whole,
and the last step that any rank has finished. The last start must end with the weights of a run that was never stopped,
bit for bit.
"""

import signal
from collections import Counter

from fairshard.checkpoint.preemption import STATUS
from tests.checkpoint.killed_life import LONGEST_DELAY_S, AnyTime, Broken, Life, Lives, run_lives
from tests.checkpoint.killed_run import DOORS, EVERY, Kind

MOST_SIGNALS = 4
WORLD_SIZE = 2


class StoppedLife(Life):
    """One run in a folder, stopped and started again until it ends."""

    def start(self, world_size, term=None):
        """Run to the end or to ``term``, an `AnyTime`, then check what must hold; returns the `Ending`."""
        newest = self.newest()
        ending = self.play(world_size, term)
        if set(ending.values("resumed")) != {str(newest)}:
            raise Broken(f"it resumed from {ending.values('resumed')}, but the newest checkpoint is {newest}")
        if ending.is_final and set(ending.codes) == {0}:
            return ending
        if set(ending.codes) != {STATUS}:
            raise Broken(f"the ranks ended with {ending.codes}, and noted {[own[-1] for own in ending.notes]}")
        newest = self.newest()
        finished = {max(int(note.split()[1]) for note in own if note.startswith("step ")) for own in ending.notes}
        stopped = {int(step) for step in ending.values("stopped")}
        if not finished == stopped == {newest}:
            raise Broken(f"finished {finished}, stopped after {stopped}, but the newest checkpoint is {newest}")
        return ending


class Loop(Lives):
    """Lives that are stopped; prints a line for each signal."""

    def __init__(self, folder, seed):
        super().__init__(folder, seed)
        self._num_late = self._num_between = 0
        self._victims = Counter()
        self._seconds = []

    @property
    def num_done(self):
        """Number of signals that have stopped a run."""
        return len(self._seconds)

    def born(self, folder, chance):
        """A new life of a random kind."""
        return StoppedLife(folder, Kind(chance.choice(DOORS), chance.random() < 0.5, chance.random() < 0.5, stops=True))

    def pass_through(self, life, chance, most):
        """Stop the life up to ``most`` times, and let it end."""
        for _ in range(most):
            term = AnyTime(chance.uniform(0, LONGEST_DELAY_S), chance.choice((0, 1, None)), signal.SIGTERM)
            ending = life.start(WORLD_SIZE, term)
            if ending.is_final:
                self._num_late += 1
                break
            self._count(ending, term, life)
        else:
            ending = life.start(WORLD_SIZE)
        self.check_bits(ending)

    def _count(self, ending, term, life):
        victims = "all ranks" if term.rank is None else f"rank {term.rank}"
        step = int(ending.values("stopped")[0])
        self._victims[victims] += 1
        self._num_between += step % EVERY != 0
        self._seconds.append(ending.stopped_s)
        print(
            f"signal {self.num_done}: {life.folder.name} ({life.kind}), {victims}; all ranks saved step {step} and "
            f"ended after {ending.stopped_s:.2f} s",
            flush=True,
        )

    def summary(self):
        """The result of all lives in a few lines."""
        counted = ", ".join(f"{name}: {number}" for name, number in self._victims.items())
        return "\n".join(
            [
                f"{self.num_done} signals in {self.num_lives} lives ({counted}): all {WORLD_SIZE} ranks ended with "
                f"status {STATUS} after the same step; no finished step was lost, and every life ended with the "
                "unbroken run's bits.",
                f"{self._num_between} stops at a step that is not saved otherwise; {self._num_late} signals came after "
                "the last step.",
                f"From the signal to the end: at most {max(self._seconds):.2f} s, "
                f"{sum(self._seconds) / len(self._seconds):.2f} s on average.",
            ]
        )


if __name__ == "__main__":
    run_lives(Loop, "signals", 50, MOST_SIGNALS)
