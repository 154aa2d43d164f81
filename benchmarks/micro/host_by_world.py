"""Measure the host time that an engine adds to each unit on 8, 1,024 and 16,384 ranks, with torch's fake process group.

    python benchmarks/micro/host_by_world.py                       # both doors, about 5 minutes
    python benchmarks/micro/host_by_world.py --engines fsdp2 --worlds 8 1024

CPU microseconds of a forward and backward per unit, minus those of the same module without an engine, and minus the
time inside the fake group's collectives, which write one piece for each rank. A unit is two square Linears. What grows
with the number of ranks is memory that must be cleared and copied, where a parameter has fewer rows than there are
ranks; see `padded`, the bytes of a unit with padding over those without.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import engines
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from report import Spread, table
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

PLAIN = "plain"
WARMUP, PASSES = 2, 7
ELEMENTS = {"8 k": (64, 20), "1 M": (724, 4)}
"""Elements of a unit, by name: the width of its Linears, and how many units are measured."""


class Inside:
    """The CPU seconds spent in the fake group's collectives since the last `take`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for name in ("all_gather_single", "_allgather_base", "reduce_scatter_single", "_reduce_scatter_base"):
            if hasattr(dist.ProcessGroup, name):
                setattr(dist.ProcessGroup, name, self._timed(getattr(dist.ProcessGroup, name)))

    def _timed(self, call: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - start

        return timed

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def measure_rank(_rank: int, engine: str, world_size: int, elements: str, path: str) -> None:
    """Write the median seconds of a forward and backward per unit, and those inside collectives, as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    inside = Inside()
    width, num_units = ELEMENTS[elements]
    model: nn.Module = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(num_units))
    )
    if engine != PLAIN:
        model = engines.build(engine, model, model, engines.Options()).model
    inputs = torch.ones(2, width)
    own, collectives = [], []
    for _ in range(WARMUP + PASSES):
        inside.take()
        start = time.process_time()
        model(inputs).sum().backward()
        spent = time.process_time() - start
        collectives.append(inside.take())
        own.append(spent - collectives[-1])
        model.zero_grad()
    found = [statistics.median(seconds[WARMUP:]) / num_units for seconds in (own, collectives)]
    Path(path).write_text(json.dumps(found))
    os._exit(0)


def measure(engine: str, world_size: int, elements: str) -> tuple[float, float]:
    """Run one cell in a process of its own; returns CPU seconds per unit outside and inside collectives."""
    with tempfile.TemporaryDirectory(prefix="fairshard-micro-") as folder:
        path = str(Path(folder, "found"))
        mp.start_processes(measure_rank, (engine, world_size, elements, path), nprocs=1, start_method="fork")
        own, collectives = json.loads(Path(path).read_text())
    return own, collectives


def padded(width: int, world_size: int) -> float:
    """How many times larger than the parameters the gathered rows of one unit are, if each is cut by rows."""
    rows = -(-width // world_size) * world_size
    return rows / width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["fairshard", "fairshard-fully-shard"])
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 1024, 16384])
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    header = ["us per unit above plain torch", "ranks", "host", "of the first", "in collectives", "padded"]
    cells = [header]
    for elements, (width, _) in ELEMENTS.items():
        runs: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for _ in range(options.repeat):
            plain, _ = measure(PLAIN, 1, elements)
            for engine in options.engines:
                for world_size in options.worlds:
                    own, collectives = measure(engine, world_size, elements)
                    runs.setdefault((engine, world_size), []).append((1e6 * (own - plain), 1e6 * collectives))
        for (engine, world_size), found in runs.items():
            first = runs[engine, options.worlds[0]]
            host, inside = (statistics.median(column) for column in zip(*found, strict=True))
            ratio = Spread.of(own / before for (own, _), (before, _) in zip(found, first, strict=True))
            fold = f"{padded(width, world_size):.1f}" if "fully-shard" in engine else ""
            name = f"{engine}, {elements}"
            cells.append([name, str(world_size), f"{host:.0f}", ratio.show(2), f"{inside:.0f}", fold])
    print(table(cells))


if __name__ == "__main__":
    main()
