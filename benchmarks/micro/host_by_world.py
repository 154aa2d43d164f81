"""Measure the host time that an engine adds to each unit on 8, 1,024 and 16,384 ranks, with torch's fake process group.

    python benchmarks/micro/host_by_world.py                       # both doors, about 2 minutes
    python benchmarks/micro/host_by_world.py --engines fsdp2 --worlds 8 1024

CPU microseconds of a forward and backward per unit, minus those of the same module without an engine. The fake group's
collectives write one piece for each rank, up to 20 ms and with cold caches after it, so they are replaced by calls that
do nothing. A unit is two square Linears, or one of at least as many rows as there are ranks. What else grows with the
number of ranks is memory that must be cleared and copied, where a parameter has fewer rows than there are ranks; see
`padded`, the bytes of a unit with padding over those without.
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
WARMUP, PASSES = 5, 40
SMALL, LARGE, TALL = "8 k", "1 M", "1 M, tall"
WIDTHS = {SMALL: 64, LARGE: 724, TALL: 64}
NUM_UNITS = {SMALL: 20, LARGE: 4, TALL: 4}
TALL_ROWS = 16384


class Tall(nn.Linear):
    """A Linear of `TALL_ROWS` rows, whose output is as wide as its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first columns of the product."""
        return super().forward(x)[:, : self.in_features]


class Done:
    """A collective that has ended."""

    def wait(self, *_args: Any) -> bool:
        """Nothing is left to wait for."""
        return True

    def is_completed(self) -> bool:
        """It has ended."""
        return True


def do_nothing_in_collectives() -> None:
    """Replace those collectives of process groups that engines call."""
    done = Done()
    for name in ("all_gather_single", "_allgather_base", "reduce_scatter_single", "_reduce_scatter_base"):
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, lambda *args, **kwargs: done)


def build_unit(kind: str) -> nn.Module:
    """One unit of the model."""
    width = WIDTHS[kind]
    return Tall(width, TALL_ROWS) if kind == TALL else nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


def measure_rank(_rank: int, engine: str, world_size: int, kind: str, path: str) -> None:
    """Write the median seconds of a forward and backward per unit, as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    do_nothing_in_collectives()
    model: nn.Module = nn.Sequential(*(build_unit(kind) for _ in range(NUM_UNITS[kind])))
    if engine != PLAIN:
        model = engines.build(engine, model, model, engines.Options()).model
    inputs = torch.ones(2, WIDTHS[kind])
    spent = []
    for _ in range(WARMUP + PASSES):
        start = time.process_time()
        model(inputs).sum().backward()
        spent.append(time.process_time() - start)
        model.zero_grad()
    Path(path).write_text(json.dumps(statistics.median(spent[WARMUP:]) / NUM_UNITS[kind]))
    os._exit(0)


def measure(engine: str, world_size: int, kind: str) -> float:
    """Run one cell in a process of its own; returns CPU seconds per unit."""
    with tempfile.TemporaryDirectory(prefix="fairshard-micro-") as folder:
        path = str(Path(folder, "found"))
        mp.start_processes(measure_rank, (engine, world_size, kind, path), nprocs=1, start_method="fork")
        return float(json.loads(Path(path).read_text()))


def padded(kind: str, world_size: int) -> float:
    """How many times larger than the parameters the gathered rows of one unit are, if each is cut by rows."""
    rows = TALL_ROWS if kind == TALL else WIDTHS[kind]
    return -(-rows // world_size) * world_size / rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["fairshard", "fairshard-fully-shard"])
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 1024, 16384])
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    cells = [["us per unit above plain torch", "ranks", "host", "of the first", "padded"]]
    for kind in WIDTHS:
        runs: dict[tuple[str, int], list[float]] = {}
        for _ in range(options.repeat):
            plain = measure(PLAIN, 1, kind)
            for engine in options.engines:
                for world_size in options.worlds:
                    added = 1e6 * (measure(engine, world_size, kind) - plain)
                    runs.setdefault((engine, world_size), []).append(added)
        for (engine, world_size), found in runs.items():
            ratio = Spread.of(own / first for own, first in zip(found, runs[engine, options.worlds[0]], strict=True))
            fold = f"{padded(kind, world_size):.1f}" if "fully-shard" in engine else ""
            host = f"{statistics.median(found):.0f}"
            cells.append([f"{engine}, {kind}", str(world_size), host, ratio.show(2), fold])
    print(table(cells))


if __name__ == "__main__":
    main()
