"""Host overhead: microseconds and calls that an engine adds to each of many tiny units, with fake collectives.

``python overhead.py JOB``, with `Job` as JSON; started by `launch`. The process group is torch's fake one, so
a single process acts as one rank of 8, and only Python is measured.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import engines
import torch
import torch.distributed as dist
from perf import OVERHEAD_HZ, Samples
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from turn import Turn

WORLD_SIZE = 8
NUM_UNITS = 200
WARMUP = 5
PLAIN = "plain"
"""The name of torch alone, whose time is subtracted from that of the engines."""


@dataclass(frozen=True)
class Job:
    """What `launch` hands to this process; `store` and `rank` are of no use to a fake group."""

    engine: str
    passes: int
    threads: int
    rank: int
    store: str
    result: str
    turn: Sequence[str] = ()
    perf: str = ""
    """File for the samples of the passes after the warm-up; see `lanes.py`."""


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(job.threads)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    model: nn.Module = nn.Sequential(*(_tiny_unit() for _ in range(NUM_UNITS)))
    if job.engine != PLAIN:
        model = engines.build(job.engine, model, model, engines.Options()).model
    turn = Turn.open(job.turn) if job.turn else None
    for _ in range(WARMUP):
        _time_pass(model, turn)
    samples = Samples(job.perf, OVERHEAD_HZ)
    samples.start()
    passes = [_time_pass(model, turn) for _ in range(job.passes)]
    samples.stop()
    cpu, wall = (statistics.median(seconds) / NUM_UNITS * 1e6 for seconds in zip(*passes, strict=True))
    result = {"us_per_unit": cpu, "wall_us_per_unit": wall, "calls_per_unit": _count_calls(model) / NUM_UNITS}
    Path(job.result).write_text(json.dumps(result))
    os._exit(0)


def _count_calls(model: nn.Module) -> int:
    """Count the functions, Python's and C's, that Python calls in one forward and backward."""
    count = 0

    def on_event(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    inputs = torch.ones(2, 8)
    sys.setprofile(on_event)
    model(inputs).sum().backward()
    sys.setprofile(None)
    return count


def _tiny_unit() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def _time_pass(model: nn.Module, turn: Turn | None) -> tuple[float, float]:
    """Time one forward and backward: CPU and wall seconds. Gradients are dropped outside the clocks.

    Nothing here waits, so both agree on a quiet machine; CPU time is also valid on a busy one.
    """
    inputs = torch.ones(2, 8)
    if turn is not None:
        turn.wait()
    cpu, wall = time.process_time(), time.perf_counter()
    model(inputs).sum().backward()
    seconds = time.process_time() - cpu, time.perf_counter() - wall
    if turn is not None:
        turn.pass_on()
    model.zero_grad()
    return seconds


if __name__ == "__main__":
    main()
