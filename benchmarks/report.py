"""From raw runs to figures: medians, paired ratios, the loss check, and the printed tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import engines

PHASES = ("forward", "backward", "optimizer")
FIGURES = ("step ms", *(f"{phase} ms" for phase in PHASES), "CPU ms", "peak MiB")

LOSS_STEPS = 3
"""Losses are compared over the first steps only, because the optimizer amplifies rounding differences later."""
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
"""Relative. fp32: equal to 4 digits. bf16: DDP runs under autocast, so its norms and residuals are fp32."""

Run = Mapping[str, Any]
"""One engine's ranks in one repeat: ``{"engine", "repeat", "ranks": [what worker.py wrote]}``."""

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

    def show(self, digits: int) -> str:
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}..{self.high:.{digits}f}]"


@dataclass(frozen=True)
class Ratio:
    """Ours over a peer's, paired by repeat, with the variant of the peer that is better in this figure."""

    spread: Spread
    variant: str


def figures(run: Run, warmup: int) -> dict[str, float]:
    """Reduce a run: the median over timed steps of the slowest rank's time, and the largest rank's memory."""
    result = {"step ms": _slowest_ms(run, warmup, *PHASES)}
    for part, figure in zip((*PHASES, "cpu"), FIGURES[1:], strict=False):
        result[figure] = _slowest_ms(run, warmup, part)
    result["peak MiB"] = max(rank["peak_bytes"] for rank in run["ranks"]) / 2**20
    return result


def _slowest_ms(run: Run, warmup: int, *parts: str) -> float:
    """Add ``parts`` of each step; return the median over timed steps of the slowest rank's."""
    by_rank = [zip(*(rank["times"][part] for part in parts), strict=True) for rank in run["ranks"]]
    slowest = [max(map(sum, step)) for step in zip(*by_rank, strict=True)]
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
        paired = [ours[repeat][figure] / theirs[repeat][figure] for repeat in ours.keys() & theirs.keys()]
        if paired:
            ratios.append(Ratio(Spread.of(paired), variant))
    return max(ratios, key=lambda ratio: ratio.spread.median, default=None)


def loss_difference(run: Run, reference: Run, precision: str) -> str | None:
    """Say where ``run`` first differs from the losses of ``reference``, rank by rank; None if it does not."""
    tolerance = LOSS_TOLERANCE[precision]
    for index, (rank, expected_rank) in enumerate(zip(run["ranks"], reference["ranks"], strict=True)):
        losses = list(zip(rank["losses"], expected_rank["losses"], strict=False))[:LOSS_STEPS]
        for step, (loss, expected) in enumerate(losses):
            if not abs(loss - expected) <= tolerance * abs(expected):
                where = f"rank {index}, step {step}"
                return f"{where}: {run['engine']} {loss:.6f}, {reference['engine']} {expected:.6f}"
    return None


def training_tables(measured: Figures, counted: Mapping[str, Any], peers: Sequence[str]) -> str:
    """Render the figures of every engine and the ratios to every peer."""
    rows = [["engine", *FIGURES, "collectives", "MiB received"]]
    for engine, repeats in measured.items():
        spreads = [Spread.of(repeat[figure] for repeat in repeats.values()).show(0) for figure in FIGURES]
        rows.append([engine, *spreads, *_traffic(counted.get(engine))])
    tables = [table(rows)]
    for ours in engines.OURS:
        ratios = [[f"{ours} over", *FIGURES]]
        for peer in (peer for peer in peers if engines.can_compare(ours, peer)):
            cells = [ratio(measured, peer, figure, ours) for figure in FIGURES]
            if all(cells):
                ratios.append([peer, *(f"{cell.spread.show(2)}{_mark(cell, peer)}" for cell in cells)])
        if len(ratios) > 1:
            tables.append(table(ratios))
    note = "* the peer's explicit prefetch, where that is its better setting"
    return "\n\n".join(tables) + f"\n{note}"


OVERHEADS = {"us per unit": "us_per_unit", "calls per unit": "calls_per_unit"}
"""What an engine adds to plain torch, and its name in the output of overhead.py."""


def overhead_table(runs: Sequence[Mapping[str, Any]], plain: str, peers: Sequence[str]) -> str:
    """Render the microseconds and the calls that each engine adds to plain torch, per unit."""
    measured = overheads(runs, plain)
    shown = [figure for figure, key in OVERHEADS.items() if all(key in run for run in runs)]  # early files lack calls
    columns = [(figure, ours) for figure in shown for ours in engines.OURS if ours in measured]
    rows = [["added to plain torch", *shown, *(f"{ours} over it: {figure}" for figure, ours in columns)]]
    for engine, repeats in measured.items():
        row = [engine]
        row += [Spread.of(repeat[figure] for repeat in repeats.values()).show(0) for figure in shown]
        for figure, ours in columns:
            ratios = [ratio(measured, peer, figure, ours) for peer in peers if engines.can_compare(ours, peer)]
            best = [one for one in ratios if one and one.variant == engine]
            row.append(best[0].spread.show(2) if best else "")
        rows.append(row)
    plain_spread = Spread.of(run["us_per_unit"] for run in runs if run["engine"] == plain)
    return f"{table(rows)}\nplain torch: {plain_spread.show(0)} us per unit"


def overheads(runs: Sequence[Mapping[str, Any]], plain: str) -> Figures:
    """Subtract each repeat's plain torch from the engines'."""
    base = {run["repeat"]: run for run in runs if run["engine"] == plain}
    result: Figures = {}
    for run in runs:
        if run["engine"] != plain and run["repeat"] in base:
            added = {figure: run[key] - base[run["repeat"]][key] for figure, key in OVERHEADS.items() if key in run}
            result.setdefault(run["engine"], {})[run["repeat"]] = added
    return result


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns under a header, the first to the left and the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    aligns = [str.ljust, *([str.rjust] * (len(widths) - 1))]
    header, *body = (
        "  ".join(align(cell, width) for align, cell, width in zip(aligns, row, widths, strict=True)) for row in rows
    )
    return "\n".join([header, "-" * len(header), *body])


def _traffic(counted: Mapping[str, Any] | None) -> tuple[str, str]:
    """Show one step's collectives and received bytes; fairshard knows which sends make an exchange."""
    if counted is None:
        return "", ""
    own = counted["own_counters"]
    calls = sum(count for count, _ in own.values()) if own else sum(counted["counts"].values())
    return str(calls), f"{sum(counted['received_bytes'].values()) / 2**20:.0f}"


def _mark(compared: Ratio, peer: str) -> str:
    return "" if compared.variant == peer else "*"
