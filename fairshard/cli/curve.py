"""``loss.png``: the loss of every step, raw and smoothed, and the validation loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

_TRAIN, _VALIDATION, _QUIET = "#3f6fb5", "#c8553d", "#6b6b6b"


def smoothed(losses: Sequence[float]) -> NDArray[np.float64]:
    """Mean of each loss and its neighbours, a fiftieth of all losses on each side; fewer near the ends."""
    kernel = np.ones(2 * (len(losses) // 50) + 1)
    padding = len(kernel) // 2
    sums = np.convolve(losses, kernel)[padding : padding + len(losses)]
    counts = np.convolve(np.ones(len(losses)), kernel)[padding : padding + len(losses)]
    means: NDArray[np.float64] = sums / counts
    return means


def draw_loss(path: Path, title: str, losses: Sequence[float], validations: Mapping[int, float]) -> None:
    """Draw the loss of steps 1, 2, ... and the validation losses, a mapping of step to loss, into a PNG."""
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = range(1, len(losses) + 1)
    means = smoothed(losses)
    axes.plot(steps, losses, color=_TRAIN, alpha=0.25, linewidth=0.8, label="training, each step")
    axes.plot(steps, means, color=_TRAIN, linewidth=1.6, label="training, smoothed")
    axes.plot(
        list(validations), list(validations.values()), "o-", color=_VALIDATION, linewidth=1.2, markersize=4.5,
        label="validation",
    )  # fmt: skip
    last = max(validations)
    axes.annotate(
        f"{validations[last]:.2f}", (last, validations[last]), xytext=(7, 0), textcoords="offset points",
        va="center", color=_VALIDATION, fontweight="bold",
    )  # fmt: skip
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title(title, loc="left", fontsize=10, color=_QUIET)
    axes.set_xlim(0, 1.08 * len(losses))
    axes.set_ylim(top=1.05 * max(*means, *validations.values()))  # one bad step must not flatten the rest
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
