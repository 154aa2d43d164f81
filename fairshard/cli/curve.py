"""``loss.png``: the loss of every step, its running mean, and the validation loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_TRAIN, _VALIDATION, _QUIET = "#3f6fb5", "#c8553d", "#6b6b6b"


def running_mean(values: Sequence[float], weight: float = 0.05) -> list[float]:
    """Exponential mean in which the first values count as much as if there had been more of them."""
    means: list[float] = []
    total = norm = 0.0
    for value in values:
        total += weight * (value - total)
        norm += weight * (1.0 - norm)
        means.append(total / norm)
    return means


def draw_loss(path: Path, title: str, losses: Sequence[float], validations: Mapping[int, float]) -> None:
    """Draw the loss of steps 1, 2, ... and the validation losses, a mapping of step to loss, into a PNG."""
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color=_TRAIN, alpha=0.25, linewidth=0.8, label="training, each step")
    axes.plot(steps, running_mean(losses), color=_TRAIN, linewidth=1.6, label="training, running mean")
    axes.plot(
        list(validations), list(validations.values()), "o-", color=_VALIDATION, linewidth=1.2, markersize=4.5,
        label="validation",
    )  # fmt: skip
    last = max(validations)
    axes.annotate(
        f"{validations[last]:.3f}", (last, validations[last]), xytext=(0, 9), textcoords="offset points",
        ha="right", color=_VALIDATION, fontweight="bold",
    )  # fmt: skip
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title(title, loc="left", fontsize=10, color=_QUIET)
    axes.set_xlim(left=0)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
