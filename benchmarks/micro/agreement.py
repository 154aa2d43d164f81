"""Measure the agreement that starts a backward: one all-gather of 2,048 bytes a rank, in microseconds.

    python benchmarks/micro/agreement.py                      # worlds 2, 3, 4, 5 and 8
    python benchmarks/micro/agreement.py --worlds 2 --steps 500

"alone" is the exchange as the engine issues it, each time from a barrier. "in a backward" is the same call within the
backward of a small model, whose units take a few microseconds each: it also waits for ranks that arrive later.
"planning" is all of `Planner.plan`: reading the graph, packing, the exchange, and the schedule. "compare" is
`compare_ranks`, from a barrier; "history" is what a forward and a step add to the host's time, without the exchange:
recording the gathers of the units, and counting the step. Each figure is that of the slowest rank, exchange by
exchange: the minimum and the median over all steps.
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

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measure import loaded_module
from report import table
from torch import nn

from fairshard.nn import FSDP, compare_ranks

NUM_UNITS, WIDTH = 8, 32
WARMUP = 5


class Timed:
    """Replaces ``owner.name``, and keeps the seconds of each call."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds: list[float] = []
        self._call = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = self._call(*args, **kwargs)
        self.seconds.append(time.perf_counter() - start)
        return result

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else lambda *args, **kwargs: self(instance, *args, **kwargs)


def measure_rank(rank: int, world_size: int, num_steps: int, folder: str) -> None:
    """Write the seconds of each exchange of one rank, by figure."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    reach = loaded_module("reach", "agree_on")
    exchange = Timed(reach, "_exchange")
    planning = Timed(loaded_module("planner", "Planner").Planner, "plan")

    comm = loaded_module("collectives", "communicator").communicator(dist.group.WORLD)
    message = bytes(reach.FIRST_NBYTES)
    for _ in range(WARMUP + num_steps):
        dist.barrier()
        reach._exchange(comm, message)
    seconds = {"alone": exchange.seconds[WARMUP:]}

    exchange.seconds = []
    model = FSDP(nn.Sequential(*(FSDP(nn.Linear(WIDTH, WIDTH)) for _ in range(NUM_UNITS))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backwards = []
    for _ in range(WARMUP + num_steps):
        loss = model(torch.ones(2, WIDTH)).sum()
        dist.barrier()
        start = time.perf_counter()
        loss.backward()
        backwards.append(time.perf_counter() - start)
        optimizer.step()
        optimizer.zero_grad()
    assert len(exchange.seconds) == len(planning.seconds) == WARMUP + num_steps, "one exchange a backward"
    seconds |= {"in a backward": exchange.seconds[WARMUP:], "planning": planning.seconds[WARMUP:]}
    seconds["backward"] = backwards[WARMUP:]
    seconds |= {"compare": compared(model, num_steps), "history": recorded(model, optimizer, num_steps)}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(seconds))
    dist.barrier()
    os._exit(0)  # gloo groups sometimes hang while Python drops its last references


def compared(model: nn.Module, num_steps: int) -> list[float]:
    """The seconds of each comparison of all ranks."""
    found = []
    for _ in range(WARMUP + num_steps):
        dist.barrier()
        start = time.perf_counter()
        compare_ranks(model)
        found.append(time.perf_counter() - start)
    return found[WARMUP:]


def recorded(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> list[float]:
    """The seconds that one forward and one step spend on the history. Ends the use of ``model``."""
    units = [part._fairshard_unit for part in model.modules() if isinstance(part, FSDP)]
    stepped_roots: Any = loaded_module("optimizer_check", "_stepped_roots")
    found = []
    for _ in range(WARMUP + num_steps):
        start = time.perf_counter()
        for unit in units:
            unit.root.order_check.gather(unit)
        for root in stepped_roots._stepped_roots(optimizer):
            root.order_check.count_step()
        found.append(time.perf_counter() - start)
    return found[WARMUP:]


def measure(world_size: int, num_steps: int) -> dict[str, list[float]]:
    """Run one world; returns the microseconds of the slowest rank, exchange by exchange."""
    with tempfile.TemporaryDirectory(prefix="fairshard-micro-") as folder:
        mp.start_processes(measure_rank, (world_size, num_steps, folder), nprocs=world_size, start_method="fork")
        ranks = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(world_size)]
    return {name: [1e6 * max(call) for call in zip(*(one[name] for one in ranks), strict=True)] for name in ranks[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 3, 4, 5, 8])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    names = ["alone", "in a backward", "planning", "backward", "compare", "history"]
    cells = [["us, least / median", *names]]
    for world_size in options.worlds:
        found = measure(world_size, options.steps)
        figures = [f"{min(found[name]):.0f} / {statistics.median(found[name]):.0f}" for name in names]
        cells.append([f"{world_size} ranks", *figures])
    print(table(cells))


if __name__ == "__main__":
    main()
