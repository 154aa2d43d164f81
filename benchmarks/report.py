"""From raw runs to figures: medians, paired ratios, the loss check, and the printed tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import engines
from training import PHASES

FIGURES = ("step ms", *(f"{phase} ms" for phase in PHASES), "CPU ms", "peak MiB")
"""Of a run that trains."""

LOSS_STEPS = 3
"""Losses are compared over the first steps only, because the optimizer amplifies rounding differences later."""
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
"""Relative. fp32: equal to 4 digits. bf16: DDP runs under autocast, so its norms and residuals are fp32."""

Run = Mapping[str, Any]
"""One engine's ranks in one repeat: ``{"engine", "repeat", "ranks": [what `training.train` returned]}``."""

Figures = dict[str, dict[int, dict[str, float]]]
"""``[engine][repeat][figure]``."""


@dataclass(frozen=True)
class Spread:
    """A median, with the least and the greatest of its values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[0], ordered[-1])

    def show(self) -> str:
        """Three digits or more, two of them behind the point if the median is small."""
        digits = 0 if self.median >= 100 else 1 if self.median >= 10 else 2
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}..{self.high:.{digits}f}]"


@dataclass(frozen=True)
class Ratio:
    """Ours over a peer's, paired by repeat, with the variant of the peer that is better in this figure."""

    spread: Spread
    variant: str


def figures(run: Run, warmup: int) -> dict[str, float]:
    """Reduce a run: the median over timed steps of the slowest rank's time, and the largest rank's memory."""
    result = {"step ms": slowest_ms(run, warmup, *PHASES)}
    for part, figure in zip((*PHASES, "cpu"), FIGURES[1:], strict=False):
        result[figure] = slowest_ms(run, warmup, part)
    result["peak MiB"] = max(rank["peak_bytes"] for rank in run["ranks"]) / 2**20
    return result


def slowest_ms(run: Run, warmup: int, *parts: str) -> float:
    """The median over steps of the slowest rank's time in ``parts`` of a step."""
    columns = [[rank["times"][part] for part in parts] for rank in run["ranks"]]
    by_rank = [[sum(step) for step in zip(*own, strict=True)] for own in columns]
    slowest = [max(step) for step in zip(*by_rank, strict=True)]
    return 1e3 * statistics.median(slowest[warmup:])


def by_engine(runs: Sequence[Run], warmup: int) -> Figures:
    """Arrange the figures of all runs."""
    result: Figures = {}
    for run in runs:
        result.setdefault(run["engine"], {})[run["repeat"]] = figures(run, warmup)
    return result


def ratio(measured: Figures, peer: str, figure: str, engine: str = "fairshard") -> Ratio | None:
    """Compare ``engine`` with ``peer`` repeat by repeat, so that slowdowns of the whole machine cancel."""
    ours = measured.get(engine, {})
    ratios = []
    for variant in engines.variants(peer):
        theirs = measured.get(variant, {})
        both = [(ours[repeat], theirs[repeat]) for repeat in ours.keys() & theirs.keys()]
        paired = [own[figure] / other[figure] for own, other in both if own.keys() & other.keys() >= {figure}]
        if paired:
            ratios.append(Ratio(Spread.of(paired), variant))
    return max(ratios, key=lambda ratio: ratio.spread.median, default=None)


def loss_difference(run: Run, reference: Run, tolerance: float, steps: int = LOSS_STEPS) -> str | None:
    """Say where ``run`` first differs from the losses of ``reference``, rank by rank; None if it does not."""
    for index, (rank, expected_rank) in enumerate(zip(run["ranks"], reference["ranks"], strict=True)):
        losses = list(zip(rank["losses"], expected_rank["losses"], strict=False))[:steps]
        for step, (loss, expected) in enumerate(losses):
            if not abs(loss - expected) <= tolerance * abs(expected):
                where = f"rank {index}, step {step}"
                return f"{where}: {run['engine']} {loss:.6f}, {reference['engine']} {expected:.6f}"
    return None


def require_equal_losses(run: Run, reference: Run, tolerance: float, steps: int = LOSS_STEPS) -> None:
    """End the program if ``run`` trains differently than ``reference``: then their times say nothing."""
    difference = loss_difference(run, reference, tolerance, steps)
    if difference is not None:
        raise SystemExit(f"error: losses must be equal for times to be compared, but differ at {difference}.")


def figures_table(measured: Figures, columns: Sequence[str], beside: Mapping[str, Sequence[str]] | None = None) -> str:
    """One row an engine; ``beside`` has more columns, whose names are under ``""``."""
    beside = beside or {}
    none = [""] * len(beside.get("", ()))
    rows = [["engine", *columns, *beside.get("", ())]]
    for engine, repeats in measured.items():
        own = [[repeat[column] for repeat in repeats.values() if column in repeat] for column in columns]
        cells = [Spread.of(values).show() if values else "" for values in own]
        rows.append([engine, *cells, *beside.get(engine, none)])
    return table(rows)


def ratio_table(measured: Figures, pairs: Iterable[tuple[str, str]], columns: Sequence[str]) -> str:
    """One row a pair of an engine and another one, both of which were measured: the first over the second."""
    rows = [["over", *columns]]
    for ours, peer in pairs:
        cells = [ratio(measured, peer, column, ours) for column in columns]
        if any(cells):
            shown = (f"{cell.spread.show()}{'' if cell.variant == peer else '*'}" if cell else "" for cell in cells)
            rows.append([f"{ours} over {peer}", *shown])
    return f"{table(rows)}\n* the peer's explicit prefetch, where that is its better setting"


def pairs_of(peers: Sequence[str]) -> list[tuple[str, str]]:
    """Each engine of ours with each peer that it can be compared with."""
    return [(ours, peer) for ours in engines.OURS for peer in peers if engines.can_compare(ours, peer)]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns under a header, the first to the left and the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    aligns = [str.ljust, *([str.rjust] * (len(widths) - 1))]
    header, *body = (
        "  ".join(align(cell, width) for align, cell, width in zip(aligns, row, widths, strict=True)) for row in rows
    )
    return "\n".join([header, "-" * len(header), *body])


OVERHEADS = {"us per unit": "us_per_unit", "calls per unit": "calls_per_unit"}
"""What an engine adds to plain torch, and its name in the output of overhead.py."""


def overheads(runs: Sequence[Mapping[str, Any]], plain: str) -> Figures:
    """Subtract each repeat's plain torch from the engines'."""
    base = {run["repeat"]: run for run in runs if run["engine"] == plain}
    result: Figures = {}
    for run in runs:
        if run["engine"] != plain and run["repeat"] in base:
            added = {figure: run[key] - base[run["repeat"]][key] for figure, key in OVERHEADS.items() if key in run}
            result.setdefault(run["engine"], {})[run["repeat"]] = added
    return result


def traffic(counted: Mapping[str, Any]) -> tuple[str, str]:
    """One rank's collectives and received MiB; fairshard knows which sends make an exchange."""
    own = counted["own_counters"]
    calls = sum(count for count, _ in own.values()) if own else sum(counted["counts"].values())
    return str(calls), f"{sum(counted['received_bytes'].values()) / 2**20:.1f}"
