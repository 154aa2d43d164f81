"""What a kill loop has done, as a table; of several loops together:

python -m tests.checkpoint.kill_table one.json two.json
"""

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.checkpoint.kill_points import POINTS
from tests.checkpoint.killed_life import ANY_TIME

_COLUMNS = (
    ("sync", lambda kill: not kill.is_async and not kill.cpu_offload),
    ("async", lambda kill: kill.is_async and not kill.cpu_offload),
    ("sync+offload", lambda kill: not kill.is_async and kill.cpu_offload),
    ("async+offload", lambda kill: kill.is_async and kill.cpu_offload),
    ("on 1", lambda kill: kill.resumed_on == 1),
    ("on 2", lambda kill: kill.resumed_on == 2),
    ("on 3", lambda kill: kill.resumed_on == 3),
    ("on 4", lambda kill: kill.resumed_on == 4),
)


@dataclass
class Killed:
    """One kill, and the start after it: its number of ranks, None until it has started, and whether it has resumed."""

    door: str
    world_size: int
    cpu_offload: bool
    is_async: bool
    victims: str
    point: str | None
    survived_s: float
    resumed_on: int | None = None
    has_resumed: bool = False


@dataclass
class Records:
    """Kills, and lives: by how much the weights of each that changed its number of ranks differ at the end."""

    kills: list[Killed] = field(default_factory=list)
    num_same: int = 0
    differences: list[float] = field(default_factory=list)

    def as_dict(self):
        """As JSON."""
        return asdict(self)

    def add(self, found):
        """Add those that `as_dict` returned."""
        self.kills += [Killed(**kill) for kill in found["kills"]]
        self.num_same += found["num_same"]
        self.differences += found["differences"]

    def missed(self):
        """The points at which no kill came."""
        return [point for point in POINTS if all(kill.point != point for kill in self.kills)]

    def lines(self):
        """The table."""
        kills = self.kills
        resumed = [kill for kill in kills if kill.resumed_on is not None]
        anew = sum(not kill.has_resumed for kill in resumed)
        victims = Counter(kill.victims for kill in kills)
        same = sum(kill.resumed_on == kill.world_size for kill in resumed)
        yield f"{len(kills)} kills in {self.num_same + len(self.differences)} lives ({_counted(victims)}),"
        yield f"{len(resumed)} resumed from the newest step ({anew} from none), {same} on as many ranks."
        yield f"{self.num_same} lives kept their number of ranks and ended with the unbroken run's bits;"
        worst = max(self.differences, default=0)
        yield f"{len(self.differences)} changed it and ended within {worst:.1e} of its weights."
        yield f"Survivors ended with an error within {max((kill.survived_s for kill in kills), default=0):.1f} s."
        names = [name for name, _ in _COLUMNS]
        yield " ".join([f"{'':21} {'kills':>5}", *names])
        for door, world_size in sorted({(kill.door, kill.world_size) for kill in kills}, reverse=True):
            own = [kill for kill in kills if (kill.door, kill.world_size) == (door, world_size)]
            yield _row(f"{door}, {world_size} rank{'s' * (world_size > 1)}", own)
        yield _row("all", kills)
        points = Counter(kill.point for kill in kills)
        named = {**POINTS, ANY_TIME: "at any time"}
        yield f"{sum(points[point] for point in named)} inside a save:"
        yield from (f"  {points[point]:4} {text}" for point, text in named.items())
        yield f"{points[None]} between them"


def _row(name, kills):
    cells = [f"{sum(map(of, kills)):{len(title)}}" for title, of in _COLUMNS]
    return " ".join([f"{name:21} {len(kills):5}", *cells])


def _counted(counter):
    return ", ".join(f"{name}: {number}" for name, number in sorted(counter.items()))


def main():
    """Print one table of the files named on the command line."""
    records = Records()
    for path in sys.argv[1:]:
        records.add(json.loads(Path(path).read_text()))
    print("\n".join(records.lines()))


if __name__ == "__main__":
    main()
