"""Timeline of a training step: when each rank computed, gathered, reduced and copied.

The input is one list of `fairshard.nn.observe` events per rank. The lanes of a rank::

    compute    forward and backward of the innermost active unit, or the wait that blocks it
    gather     from the issue of a unit's all-gather until the unit has waited for it
    reduce     from the launch of a bucket's reduce-scatter until its sums are delivered to the shards
    copy       copies of reduced gradients to host memory
    optimizer  optimizer steps

A lane has one row for each interval that was open at the same time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from fairshard.observe.observer import observe
from fairshard.observe.unit_event import END, UnitEvent
from fairshard.utils.messages import gather_objects, host_group

__all__ = ["Bar", "bars", "draw_timeline", "timeline", "write_trace"]

LANES = ("compute", "gather", "reduce", "copy", "optimizer")

_WAITS = {"unshard_wait": "wait for gather", "reduce_wait": "wait for reduce", "copy_wait": "wait for copy"}
_ON_COMPUTE = {"forward": "forward", "backward": "backward", "write_grads": "write gradients", **_WAITS}
_ALONE = {"copy_to_host": ("copy", "copy to host"), "optimizer_step": ("optimizer", "optimizer step")}
_COLORS = {
    "forward": "#3f6fb5",
    "backward": "#5d9c8b",
    "write gradients": "#9b7bb8",
    **dict.fromkeys(_WAITS.values(), "#d9d9d9"),
    "gather": "#e0a63b",
    "reduce": "#c8553d",
    "copy to host": "#7a6a5c",
    "optimizer step": "#4a4a4a",
}
_LETTER = 0.005  # of the whole width, per letter: a bar too narrow for its name has no label
_THIN = 0.002  # of the whole width: a bar this thin has no edge, which would cover it


@dataclass(frozen=True)
class Bar:
    """An interval from ``start`` to ``end``, in seconds, in ``row`` of ``lane``."""

    lane: str
    row: int
    kind: str
    fqn: str
    start: float
    end: float


@contextmanager
def timeline(model: nn.Module, *paths: Path | str, title: str = "") -> Iterator[None]:
    """Observe ``model`` in the block; rank 0 then writes the timeline of all ranks to each path. **Collective.**

    A path that ends in ``.json`` gets Chrome's trace, any other a picture (`write_trace`, `draw_timeline`); their
    folder must exist. Ranks may have different clocks: each counts time from when it has heard from all others::

        with fairshard.timeline(model, "step.png", "step.json"):
            model(inputs).sum().backward()

    Raises:
        ValueError: ``model`` contains no unit.
    """
    group = host_group()
    gather_objects(None, group)
    start = time.perf_counter()
    events: list[UnitEvent] = []
    with observe(model, events.append):
        yield
    by_rank = gather_objects([event._replace(time=event.time - start) for event in events], group)
    for path in map(Path, paths) if group is None or group.rank() == 0 else ():
        if path.suffix == ".json":
            write_trace(path, by_rank)
        else:
            draw_timeline(path, by_rank, title)


def bars(events: Sequence[UnitEvent]) -> list[Bar]:
    """Bars of the events of one rank, sorted by start; an interval without an end lasts until the last event."""
    found = sorted(
        [*_compute_bars(events), *_paired_bars(events), *_gather_bars(events)], key=lambda bar: (bar.start, bar.end)
    )
    ends: dict[str, list[float]] = {lane: [] for lane in LANES}
    placed = []
    for bar in found:
        rows = ends[bar.lane]
        row = next((index for index, end in enumerate(rows) if end <= bar.start), len(rows))
        rows[row : row + 1] = [bar.end]
        placed.append(Bar(bar.lane, row, bar.kind, bar.fqn, bar.start, bar.end))
    return placed


def write_trace(path: Path, by_rank: Sequence[Sequence[UnitEvent]]) -> None:
    """Write the events of every rank in Chrome's trace format: one process per rank, one thread per row of a lane.

    ``chrome://tracing`` and ``ui.perfetto.dev`` open it. Times should begin near 0 on every rank.
    """
    entries: list[dict[str, Any]] = []
    for rank, events in enumerate(by_rank):
        shown = bars(events)
        threads = {place: number for number, place in enumerate(_rows([shown]))}
        entries.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        for (lane, row), number in threads.items():
            place = {"ph": "M", "pid": rank, "tid": number}
            name = lane if row == 0 else f"{lane} ({row + 1})"
            entries.append({**place, "name": "thread_name", "args": {"name": name}})
            entries.append({**place, "name": "thread_sort_index", "args": {"sort_index": number}})
        entries += [
            {
                "ph": "X",
                "name": _title(bar),
                "cat": bar.kind,
                "pid": rank,
                "tid": threads[bar.lane, bar.row],
                "ts": bar.start * 1e6,
                "dur": (bar.end - bar.start) * 1e6,
            }
            for bar in shown
        ]
    path.write_text(json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"}), encoding="utf-8")


def draw_timeline(path: Path, by_rank: Sequence[Sequence[UnitEvent]], title: str) -> None:
    """Draw the events of every rank into a PNG, one rank below the other. Needs matplotlib (``fairshard[cli]``)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = [bars(events) for events in by_rank]
    places = [(rank, *place) for rank, one in enumerate(shown) for place in _rows([one])]
    heights = {place: number + 0.6 * place[0] for number, place in enumerate(places)}  # a gap between ranks
    span = max((bar.end for one in shown for bar in one), default=0.0) * 1e3
    bottom = max(heights.values(), default=0.0)
    figure = Figure(figsize=(14, 1.8 + 0.3 * bottom), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for rank, one in enumerate(shown):
        for bar in one:
            height = heights[rank, bar.lane, bar.row]
            start, width = bar.start * 1e3, (bar.end - bar.start) * 1e3
            color = _COLORS[bar.kind]
            edge = "white" if width > _THIN * span else color
            axes.broken_barh([(start, width)], (height - 0.42, 0.84), facecolor=color, edgecolor=edge, linewidth=0.4)
            name = bar.fqn or "root"
            if width > _LETTER * len(name) * span and bar.kind not in _WAITS.values():
                axes.text(start + width / 2, height, name, ha="center", va="center", fontsize=6, color="white")
    axes.set_yticks(list(heights.values()), [_row_label(place) for place in heights], fontsize=8)
    axes.set_ylim(bottom + 0.7, -0.7)
    axes.set_xlim(0, span or 1)
    axes.set_xlabel("ms")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    seen = {bar.kind for one in shown for bar in one}
    kinds = [kind for kind in _COLORS if kind in seen and kind not in _WAITS.values()]
    patches = [Patch(color=_COLORS[kind], label=kind) for kind in kinds]
    if seen & set(_WAITS.values()):
        patches.append(Patch(color=_COLORS[_WAITS["unshard_wait"]], label="wait"))
    figure.legend(handles=patches, loc="outside lower center", ncols=8, frameon=False, fontsize=8)
    figure.savefig(path)


@dataclass
class _OpenWork:
    """Open intervals of a rank, as a stack: the last one is active, the others enclose it."""

    began: float = 0.0
    stack: list[tuple[str, str]] = field(default_factory=list)

    def cut(self, at: float) -> Iterator[Bar]:
        """Yield the bar of the active interval up to ``at``, and start the next bar there."""
        if self.stack and at > self.began:
            kind, fqn = self.stack[-1]
            yield Bar("compute", 0, kind, fqn, self.began, at)
        self.began = at


def _compute_bars(events: Sequence[UnitEvent]) -> Iterator[Bar]:
    work = _OpenWork()
    for event in events:
        name = event.event.removesuffix(END)
        if name not in _ON_COMPUTE:
            continue
        entry = _ON_COMPUTE[name], event.fqn
        if not event.event.endswith(END):
            yield from work.cut(event.time)
            work.stack.append(entry)
        elif entry in work.stack:
            yield from work.cut(event.time)
            del work.stack[len(work.stack) - 1 - work.stack[::-1].index(entry)]
    if events:
        yield from work.cut(events[-1].time)


def _paired_bars(events: Sequence[UnitEvent]) -> Iterator[Bar]:
    """Bars of reductions, copies and steps; bars of the same name end in the order in which they began."""
    kinds = {**_ALONE, "reduce": ("reduce", "reduce")}
    begun: dict[tuple[str, str], list[float]] = {}
    for event in events:
        name = event.event.removesuffix(END)
        if name in kinds and not event.event.endswith(END):
            begun.setdefault((name, event.fqn), []).append(event.time)
        elif name in kinds and begun.get((name, event.fqn)):
            yield Bar(kinds[name][0], 0, kinds[name][1], event.fqn, begun[name, event.fqn].pop(0), event.time)
    for (name, fqn), starts in begun.items():
        for start in starts:
            yield Bar(kinds[name][0], 0, kinds[name][1], fqn, start, events[-1].time)


def _gather_bars(events: Sequence[UnitEvent]) -> Iterator[Bar]:
    begun: dict[str, float] = {}
    for event in events:
        if event.event == "unshard":
            begun[event.fqn] = event.time
        elif event.event in ("unshard_wait" + END, "reshard") and event.fqn in begun:
            yield Bar("gather", 0, "gather", event.fqn, begun.pop(event.fqn), event.time)
    for fqn, start in begun.items():
        yield Bar("gather", 0, "gather", fqn, start, events[-1].time)


def _rows(shown: Sequence[Sequence[Bar]]) -> list[tuple[str, int]]:
    """``(lane, row)`` of all bars, in the order of `LANES`."""
    places = {(bar.lane, bar.row) for one in shown for bar in one}
    return sorted(places, key=lambda place: (LANES.index(place[0]), place[1]))


def _row_label(place: tuple[int, str, int]) -> str:
    rank, lane, row = place
    return f"rank {rank}  {lane}" if row == 0 else ""


def _title(bar: Bar) -> str:
    return bar.kind if bar.lane == "optimizer" else f"{bar.kind} {bar.fqn or 'root'}"
