"""``--trace STEP``: ``trace.json`` and ``trace.png``, the timeline of every rank in one step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from fairshard.nn import UnitEvent, observe
from fairshard.observe.timeline import draw_timeline, write_trace
from fairshard.utils.messages import gather_objects, host_group

TRACE_FILES = ("trace.json", "trace.png")


@contextlib.contextmanager
def traced(model: nn.Module, folder: Path, step: int, rank: int) -> Iterator[None]:
    """Observe ``model`` in the context, and write the events of all ranks into ``folder``. **Collective.**

    Ranks may have different clocks: each counts time from the moment it has received a message from all others.
    """
    group = host_group()
    gather_objects(None, group)
    start = time.perf_counter()
    events: list[UnitEvent] = []
    with observe(model, events.append):
        yield
    by_rank = gather_objects([event._replace(time=event.time - start) for event in events], group)
    if rank == 0:
        trace, picture = TRACE_FILES
        write_trace(folder / trace, by_rank)
        draw_timeline(folder / picture, by_rank, f"fairshard train, {folder.name}, step {step}")
