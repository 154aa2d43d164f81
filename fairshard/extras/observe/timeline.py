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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from fairshard.extras.observe.observer import observe
from fairshard.extras.observe.unit_event import END, UnitEvent
from fairshard.setup.arguments import units_to
from fairshard.utils.collectives import gather_objects
from fairshard.utils.groups import host_group

LANES = ("compute", "gather", "reduce", "copy", "optimizer")

_WAITS = {"unshard_wait": "wait for gather", "reduce_wait": "wait for reduce", "copy_wait": "wait for copy"}
_ON_COMPUTE = {"forward": "forward", "backward": "backward", "write_grads": "write gradients", **_WAITS}
_BESIDE = {
    "unshard": ("gather", "gather"),
    "reduce": ("reduce", "reduce"),
    "copy_to_host": ("copy", "copy to host"),
    "optimizer_step": ("optimizer", "optimizer step"),
}
"""The lane and the kind of bars that compute goes on beside, by the event that begins them."""
_ENDS = {name + END: name for name in _BESIDE} | {"unshard_wait" + END: "unshard", "reshard": "unshard"}
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
_COMMUNICATION = ("gather", "reduce", "copy")
_ENDINGS = (".json", ".png", ".pdf", ".svg")
_INCHES = 10.0
_LETTER = 0.0078  # of the whole width, per letter: a bar too narrow for its name has a shorter one, or none
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

    A path that ends in ``.json`` gets Chrome's trace (`write_trace`), one that ends in ``.png``, ``.pdf`` or ``.svg`` a
    picture (`draw_timeline`). Their folders must exist. Ranks may have different clocks: each counts time from when it
    has heard from all others::

        with fairshard.timeline(model, "step.png", "step.json"):
            model(inputs).sum().backward()

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``model`` contains no unit; a path has another ending; on every rank, if a folder does not exist on
            rank 0.
    """
    unit = units_to("to be observed", model, "Shard it first.")[0]
    odd = [path for path in paths if Path(path).suffix not in _ENDINGS]
    if odd:
        raise ValueError(f"A path of a timeline must end in {', '.join(_ENDINGS)}, but is {str(odd[0])!r}.")
    group = host_group()
    missing = gather_objects([str(Path(path).parent) for path in paths if not Path(path).parent.is_dir()], group)[0]
    if missing:
        raise ValueError(f"The folder of a timeline must exist, but {missing[0]} does not (rank 0). Make it first.")
    start = time.perf_counter()
    events: list[UnitEvent] = []
    with observe(model, events.append):
        yield
    by_rank = gather_objects([event._replace(time=event.time - start) for event in events], group)
    waits_show = unit.root is not None and not unit.root.shared.is_asynchronous
    for path in map(Path, paths) if group is None or group.rank() == 0 else ():
        if path.suffix == ".json":
            write_trace(path, by_rank)
        else:
            draw_timeline(path, by_rank, title, headline=waits_show)


def bars(events: Sequence[UnitEvent]) -> list[Bar]:
    """Bars of the events of one rank, sorted by start; an interval without an end lasts until the last event."""
    found = sorted([*_compute_bars(events), *_bars_beside(events)], key=lambda bar: (bar.start, bar.end))
    ends: dict[str, list[float]] = {lane: [] for lane in LANES}
    placed = []
    for bar in found:
        rows = ends[bar.lane]
        row = next((index for index, end in enumerate(rows) if end <= bar.start), len(rows))
        rows[row : row + 1] = [bar.end]
        placed.append(replace(bar, row=row))
    return placed


def write_trace(path: Path, by_rank: Sequence[Sequence[UnitEvent]]) -> None:
    """Write the events of every rank in Chrome's trace format: one process per rank, one thread per row of a lane.

    ``chrome://tracing`` and ``ui.perfetto.dev`` open it. Times should begin near 0 on every rank.
    """
    entries: list[dict[str, Any]] = []
    for rank, events in enumerate(by_rank):
        shown = bars(events)
        threads = {place: number for number, place in enumerate(_rows(shown))}
        entries.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        for (lane, row), number in threads.items():
            name = lane if row == 0 else f"{lane} ({row + 1})"
            for key, value in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": number})):
                entries.append({"ph": "M", "pid": rank, "tid": number, "name": key, "args": value})
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


@dataclass(frozen=True)
class Overlap:
    """Seconds with a gather, reduction or copy under way, and those of them in which the rank waited for it."""

    on_way: float
    waited: float

    @property
    def hidden(self) -> float:
        """The share of communication behind which the rank did other work; 1 without communication."""
        return 1 - self.waited / self.on_way if self.on_way else 1.0


def overlap(shown: Sequence[Bar]) -> Overlap:
    """How much communication is hidden in these bars of one rank.

    Only where waiting blocks the host, as on the CPU: on an accelerator the device waits, which events do not show.
    """
    on_way = _union((bar.start, bar.end) for bar in shown if bar.lane in _COMMUNICATION)
    waits = _union((bar.start, bar.end) for bar in shown if bar.kind in _WAITS.values())
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in on_way for b in waits)
    return Overlap(sum(end - start for start, end in on_way), both)


def draw_timeline(path: Path, by_rank: Sequence[Sequence[UnitEvent]], title: str, headline: bool = True) -> None:
    """Draw the events of every rank into a PNG, one rank below the other. Needs matplotlib (``fairshard[cli]``).

    ``headline``: say how much communication is hidden. Pass False for events of an accelerator; see `overlap`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = [bars(events) for events in by_rank]
    places = [(rank, *place) for rank, one in enumerate(shown) for place in _rows(one)]
    heights = {place: number + 0.6 * place[0] for number, place in enumerate(places)}  # a gap between ranks
    span = max((bar.end for one in shown for bar in one), default=0.0) * 1e3
    bottom = max(heights.values(), default=0.0)
    figure = Figure(figsize=(_INCHES, 2.3 + 0.3 * bottom), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for rank, one in enumerate(shown):
        for bar in one:
            height = heights[rank, bar.lane, bar.row]
            start, width = bar.start * 1e3, (bar.end - bar.start) * 1e3
            color = _COLORS[bar.kind]
            edge = "white" if width > _THIN * span else color
            axes.broken_barh([(start, width)], (height - 0.42, 0.84), facecolor=color, edgecolor=edge, linewidth=0.4)
            name = "" if bar.kind in _WAITS.values() else _fitting(bar.fqn, width / span)
            ink = "black" if bar.kind == "gather" else "white"
            axes.text(start + width / 2, height, name, ha="center", va="center", fontsize=8.5, color=ink)
    labels = [f"rank {rank}  {lane}" if row == 0 else "" for rank, lane, row in heights]
    axes.set_yticks(list(heights.values()), labels, fontsize=10)
    axes.set_ylim(bottom + 0.7, -0.7)
    axes.set_xlim(0, 1.01 * span or 1)  # room for the last bar, which is thin
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("ms", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    found = [(overlap(one), rank) for rank, one in enumerate(shown) if one]
    if headline and found:
        least, rank = min(found, key=lambda each: each[0].hidden)
        figure.suptitle(f"{least.hidden:.0%} of communication hidden", x=0.01, ha="left", fontsize=17, weight="bold")
        waited, on_way = _ms_text(least.waited), _ms_text(least.on_way)
        title += f"\nrank {rank} waited {waited} ms of the {on_way} ms with a gather, reduction or copy under way"
    axes.set_title(title, loc="left", fontsize=11)
    seen = {bar.kind for one in shown for bar in one}
    names = {"wait" if kind in _WAITS.values() else kind: color for kind, color in _COLORS.items() if kind in seen}
    patches = [Patch(color=color, label=name) for name, color in names.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=8, frameon=False, fontsize=10)
    figure.savefig(path)


def _ms_text(seconds: float) -> str:
    """Seconds as milliseconds: 1,234 or 1.23."""
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def _fitting(fqn: str, share: float) -> str:
    """The name of a unit, or the short form of it, that fits a bar of this share of the width; empty if none does."""
    names = fqn.split(", ")
    ends = [name.rpartition(".")[2] or "root" for name in names]
    several = [f"{len(ends)} units"] if len(ends) > 1 else []
    forms = [", ".join(name or "root" for name in names), ", ".join(ends), *several]
    return next((form for form in forms if share > _LETTER * (len(form) + 0.6)), "")


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The time that is in any of ``spans``, as disjoint spans."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _compute_bars(events: Sequence[UnitEvent]) -> Iterator[Bar]:
    """Bars of the innermost open interval; the others, which enclose it, go on when it ends."""
    began, stack = 0.0, list[tuple[str, str]]()
    for event in events:
        name = event.event.removesuffix(END)
        entry, is_end = (_ON_COMPUTE.get(name, ""), event.fqn), name != event.event
        if name not in _ON_COMPUTE or (is_end and entry not in stack):
            continue
        if stack and event.time > began:
            yield Bar("compute", 0, *stack[-1], began, event.time)
        began = event.time
        if is_end:
            del stack[len(stack) - 1 - stack[::-1].index(entry)]
        else:
            stack.append(entry)
    if stack and events[-1].time > began:
        yield Bar("compute", 0, *stack[-1], began, events[-1].time)


def _bars_beside(events: Sequence[UnitEvent]) -> Iterator[Bar]:
    """Bars of gathers, reductions, copies and steps; those of one name end in the order in which they began."""
    begun: dict[tuple[str, str], list[float]] = {}
    for event in events:
        if event.event in _BESIDE:
            begun.setdefault((event.event, event.fqn), []).append(event.time)
        name = _ENDS.get(event.event, "")
        if begun.get((name, event.fqn)):
            lane, kind = _BESIDE[name]
            yield Bar(lane, 0, kind, event.fqn, begun[name, event.fqn].pop(0), event.time)
    for (name, fqn), starts in begun.items():
        yield from (Bar(_BESIDE[name][0], 0, _BESIDE[name][1], fqn, start, events[-1].time) for start in starts)


def _rows(shown: Sequence[Bar]) -> list[tuple[str, int]]:
    """``(lane, row)`` of all bars, in the order of `LANES`."""
    places = {(bar.lane, bar.row) for bar in shown}
    return sorted(places, key=lambda place: (LANES.index(place[0]), place[1]))


def _title(bar: Bar) -> str:
    return bar.kind if bar.lane == "optimizer" else f"{bar.kind} {bar.fqn or 'root'}"
