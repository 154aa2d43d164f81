"""``run.png``: loss, learning rate, tokens/s and memory of a run, step by step."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from fairshard.cli.metrics import StepMetrics, StepTotals, Summary
from fairshard.cli.progress import loss_text
from fairshard.utils.size_text import size_text

_TRAIN, _VALIDATION, _RATE, _SPEED = "#3f6fb5", "#c8553d", "#9b7bb8", "#5d9c8b"
_RANKS = ("#3f6fb5", "#e0a63b", "#5d9c8b", "#c8553d")
_QUIET, _GRID = "#6b6b6b", "#e4e4e4"
_WIDTH = 105  # letters of a line of the title
_MAX_LINES = 3  # that the model, and the settings, may fill


def smoothed(losses: Sequence[float]) -> NDArray[np.float64]:
    """Mean of each loss and its neighbours, a fiftieth of all losses on each side.

    Near an end fewer on both sides, so that the means begin at the first loss and end at the last.
    """
    values = np.asarray(losses, np.float64)
    last = len(values) - 1
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    reach = np.minimum(np.minimum(at, last - at), len(values) // 50)
    means: NDArray[np.float64] = (sums[at + reach + 1] - sums[at - reach]) / (2 * reach + 1)
    return means


def draw_run(
    path: Path, title: tuple[str, str], totals: StepTotals, validations: Mapping[int, float], summary: Summary
) -> None:
    """Draw a run into a PNG: its loss above; learning rate, tokens/s and memory below.

    ``validations`` maps steps to losses.
    """
    figure = Figure(figsize=(10, 7), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 3, height_ratios=(1.9, 1))
    _draw_loss(figure.add_subplot(grid[0, :]), totals.losses, validations, loss_text(summary))
    steps = [step.step for step in totals.shown]
    rate, speed, memory = (figure.add_subplot(grid[1, column]) for column in range(3))
    rate.plot(steps, [step.lr for step in totals.shown], color=_RATE, linewidth=1.8, marker=_mark(steps))
    _dress(rate, "learning rate", len(totals.losses))
    rate.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    rates = [step.tokens_per_s for step in totals.shown]
    speed.plot(steps, rates, color=_SPEED, alpha=0.3, linewidth=0.8)
    speed.plot(steps, smoothed(rates), color=_SPEED, linewidth=1.8, marker=_mark(steps))
    _dress(speed, f"tokens/s: {_count(summary.tokens_per_s)}", len(totals.losses))
    speed.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _count(value)))
    _draw_memory(memory, totals.shown, summary, len(totals.losses))
    lines = [part for line in title for part in textwrap.wrap(line, _WIDTH, max_lines=_MAX_LINES, placeholder=" ...")]
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=12)
    figure.savefig(path)


def _draw_loss(axes: Any, losses: Sequence[float], validations: Mapping[int, float], text: str) -> None:
    steps = range(1, len(losses) + 1)
    means = smoothed(losses)
    axes.plot(steps, losses, color=_TRAIN, alpha=0.3, linewidth=0.8, label="training, each step")
    axes.plot(steps, means, color=_TRAIN, linewidth=1.8, label="training, smoothed", marker=_mark(steps))
    axes.plot(
        list(validations), list(validations.values()), "o--", color=_VALIDATION, linewidth=1.2, markersize=6,
        label="validation",
    )  # fmt: skip
    last = max(validations)
    axes.annotate(
        f"{validations[last]:.2f}", (last, validations[last]), xytext=(7, 0), textcoords="offset points",
        va="center", color=_VALIDATION, fontweight="bold", fontsize=12,
    )  # fmt: skip
    _dress(axes, f"validation loss: {text}", len(losses), fontsize=17, num_ticks=5)
    axes.set_xlim(-0.01 * len(losses), 1.08 * len(losses))
    axes.set_ylim(top=1.05 * max(*means, *validations.values()))  # one bad step must not flatten the rest
    axes.legend(frameon=False, fontsize=11)


def _draw_memory(axes: Any, shown: Sequence[StepMetrics], summary: Summary, num_steps: int) -> None:
    steps = [step.step for step in shown]
    num_ranks = len(shown[0].mem_bytes)
    picked = range(num_ranks) if num_ranks <= len(_RANKS) else (0, num_ranks - 1)
    for rank, color in zip(picked, _RANKS, strict=False):
        style: dict[str, Any] = {"color": color, "marker": _mark(steps)}
        axes.plot(steps, [step.mem_bytes[rank] for step in shown], linewidth=1.8, label=f"rank {rank}", **style)
        state = [step.state_bytes[rank] if step.state_bytes else math.nan for step in shown]
        axes.plot(steps, state, linewidth=1.4, linestyle=":", label="its state" if rank == 0 else None, **style)
    _dress(axes, f"peak memory: {size_text(max(summary.peak_bytes))}", num_steps)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(value)))
    axes.legend(frameon=False, fontsize=9)


def _dress(axes: Any, title: str, num_steps: int, fontsize: int = 13, num_ticks: int = 3) -> None:
    axes.set_title(title, loc="left", fontsize=fontsize, fontweight="bold")
    axes.set_xlabel("step", color=_QUIET)
    axes.set_xlim(0, 1.02 * max(num_steps, 1))
    axes.xaxis.set_major_locator(MaxNLocator(num_ticks, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _mark(steps: Sequence[int]) -> str:
    """A point where there is one step, of which a line would show nothing."""
    return "o" if len(steps) == 1 else ""


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
