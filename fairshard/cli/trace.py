"""``--trace STEP``: ``trace.json`` and ``trace.png``, the timeline of every rank in one step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from fairshard.nn import UnitEvent, observe
from fairshard.observe.timeline import draw_timeline, gathered_bytes, write_trace
from fairshard.plan.summary import unit_table
from fairshard.utils.device import memory_allocated
from fairshard.utils.messages import gather_objects, host_group
from fairshard.utils.streams import is_asynchronous

TRACE_FILES = ("trace.json", "trace.png")


@contextlib.contextmanager
def traced(model: nn.Module, folder: Path, step: int, rank: int, device: torch.device) -> Iterator[None]:
    """Observe ``model`` in the context, and write the events of all ranks into ``folder``. **Collective.**

    Ranks may have different clocks: each counts time from the moment it has received a message from all others.
    """
    group = host_group()
    gather_objects(None, group)
    start = time.perf_counter()
    events: list[UnitEvent] = []
    memory: list[tuple[float, int]] = []
    on_device = is_asynchronous(device)

    def note(event: UnitEvent) -> None:
        events.append(event)
        if on_device:
            memory.append((event.time - start, memory_allocated(device)))

    with observe(model, note):
        yield
    own = [event._replace(time=event.time - start) for event in events]
    if not on_device:  # the process keeps what it has freed
        memory = gathered_bytes(own, {row.fqn: row.full_nbytes for row in unit_table(model)})
    by_rank = gather_objects((own, memory), group)
    if rank == 0:
        trace, picture = TRACE_FILES
        each = [events for events, _ in by_rank]
        write_trace(folder / trace, each)
        draw_timeline(
            folder / picture,
            each,
            f"fairshard train, {folder.name}, step {step}",
            [memory for _, memory in by_rank],
            "memory of tensors" if on_device else "gathered weights",
            headline=not on_device,
        )
