"""Host overhead: microseconds and calls that an engine adds to each of many tiny units, with fake collectives.

The process group is torch's fake one, so a single process acts as one rank of several, and only Python is measured.
"""

from __future__ import annotations

import statistics
import sys
import time
from types import FrameType

import torch
from rank import Rank
from torch import nn

NUM_UNITS = 200
WARMUP = 5
PLAIN = "plain"
"""The name of torch alone, whose time is subtracted from that of the engines."""


def measure(rank: Rank, engine: str, passes: int) -> dict[str, float]:
    """Time ``passes`` of a model of tiny units, and count the calls of one more."""
    import engines

    model: nn.Module = nn.Sequential(*(_tiny_unit() for _ in range(NUM_UNITS)))
    if engine != PLAIN:
        model = engines.build(engine, model, model, engines.Options()).model
    timed = [_time_pass(model, rank) for _ in range(WARMUP + passes)][WARMUP:]
    us_per_unit = statistics.median(timed) / NUM_UNITS * 1e6
    return {"us_per_unit": us_per_unit, "calls_per_unit": _count_calls(model) / NUM_UNITS}


def _tiny_unit() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def _time_pass(model: nn.Module, rank: Rank) -> float:
    """CPU seconds of one forward and backward, which are valid on a busy machine, too."""
    inputs = torch.ones(2, 8)
    with rank.turn():
        start = time.process_time()
        model(inputs).sum().backward()
        seconds = time.process_time() - start
    model.zero_grad()
    return seconds


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
