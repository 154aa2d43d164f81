"""``fairshard plan --png``: the terms of the predicted peak, as bars, with the device's limit."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fairshard.extras.planning.wrap_plan import WrapPlan
from fairshard.utils.size_text import size_text

_COLORS = ("#3f6fb5", "#e0a63b", "#5d9c8b", "#c8553d", "#9b7bb8", "#7a6a5c", "#86a8d6", "#d9a79a", "#a9c9be", "#bdbdbd")
_HEADLINE, _LABEL = 74, 30  # letters of a line
_QUIET = "#6b6b6b"
_PLAIN: dict[str, Any] = {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.5}, "zorder": 4}
_OVER: dict[str, Any] = {**_PLAIN, "ha": "center", "va": "center"}


def draw_plans(
    path: Path, title: str, names: Sequence[str], plans: Sequence[WrapPlan], device_nbytes: int | None
) -> None:
    """Draw one plan as a bar for each term and their sum, or several as one bar each, cut into terms."""
    one = plans[0] if len(plans) == 1 else None
    num_bars = len(_terms(one)) + 1 if one is not None else len(plans)
    figure = Figure(figsize=(10, 2.2 + 0.55 * num_bars), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    most = max(plan.peak_nbytes for plan in plans)
    # A limit far away would flatten the bars: it is named in the headline.
    is_near = device_nbytes is not None and device_nbytes <= 4 * most
    right = 1.16 * max(most, device_nbytes or 0) if is_near else 1.16 * most
    if one is not None:
        _draw_one(axes, one, right)
    else:
        _draw_several(axes, names, plans, right)
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=11)
    if is_near and device_nbytes is not None:
        axes.axvline(device_nbytes, color="#c8553d", linestyle="--", linewidth=1.8)
        axes.text(device_nbytes, -0.7, f"limit {size_text(device_nbytes)}", color="#c8553d", fontsize=12, **_OVER)
    axes.set_xlim(0, right)
    axes.set_ylim(num_bars - 0.45, -1.0 if is_near else -0.7)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(value)))
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.tick_params(labelsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{title}; without activations", loc="left", fontsize=11, color=_QUIET)
    headline = textwrap.fill(_headline(names, plans, device_nbytes), _HEADLINE)
    figure.suptitle(headline, x=0.01, ha="left", fontsize=15, fontweight="bold")
    figure.savefig(path)


def _headline(names: Sequence[str], plans: Sequence[WrapPlan], device_nbytes: int | None) -> str:
    if len(plans) == 1:
        peak = size_text(plans[0].peak_nbytes)
        if device_nbytes is None:
            return f"{peak} at the worst moment, {plans[0].peak_at}"
        return f"Fits in {size_text(device_nbytes)}: {_fits(plans[0], device_nbytes)}, {peak} at the worst moment"
    least = min(range(len(plans)), key=lambda index: plans[index].peak_nbytes)
    text = f"{names[least].replace(',', ', ')} needs least: {size_text(plans[least].peak_nbytes)}"
    if device_nbytes is None:
        return text
    num_fitting = sum(plan.peak_nbytes <= device_nbytes for plan in plans)
    return f"{text}; {num_fitting} of {len(plans)} fit in {size_text(device_nbytes)}"


def _fits(plan: WrapPlan, device_nbytes: int) -> str:
    return "yes" if plan.peak_nbytes <= device_nbytes else "no"


def _terms(plan: WrapPlan) -> list[tuple[str, int]]:
    """The terms that count for the peak, largest first."""
    counted = [term for term in plan.terms if not term.on_host or plan.device == "cpu"]
    names = [(term.name + (" (offloaded)" if term.on_host else ""), term.nbytes) for term in counted]
    return sorted(names, key=lambda term: -term[1])


def _draw_one(axes: Any, plan: WrapPlan, right: float) -> None:
    """A staircase of terms that ends at their sum."""
    left = 0
    terms = _terms(plan)
    for row, (_, nbytes) in enumerate(terms):
        axes.barh(row, nbytes, left=left, color=_COLORS[row % len(_COLORS)], height=0.7)
        axes.text(left + nbytes + 0.008 * right, row, size_text(nbytes), va="center", fontsize=12, **_PLAIN)
        left += nbytes
    axes.barh(len(terms), left, color="#4a4a4a", height=0.7)
    axes.text(left + 0.008 * right, len(terms), size_text(left), va="center", fontsize=13, weight="bold", **_PLAIN)
    axes.set_yticks(range(len(terms) + 1), [*(name for name, _ in terms), "peak"])


def _draw_several(axes: Any, names: Sequence[str], plans: Sequence[WrapPlan], right: float) -> None:
    kinds = list(dict.fromkeys(name for plan in plans for name, _ in _terms(plan)))
    for index, kind in enumerate(kinds):
        sizes = [dict(_terms(plan)) for plan in plans]
        lefts = [sum(own.get(other, 0) for other in kinds[:index]) for own in sizes]
        widths = [own.get(kind, 0) for own in sizes]
        color = _COLORS[index % len(_COLORS)]
        axes.barh(range(len(plans)), widths, left=lefts, color=color, height=0.7, label=kind)
    for row, plan in enumerate(plans):
        axes.text(
            plan.peak_nbytes + 0.008 * right, row, size_text(plan.peak_nbytes), va="center", fontsize=12,
            fontweight="bold", **_PLAIN,
        )  # fmt: skip
    axes.set_yticks(range(len(plans)), [_broken(name) for name in names])


def _broken(name: str) -> str:
    """The name of a wrapping on at most three lines: the policy, which may name many classes, and the placement."""
    policy, at, placement = name.partition("@")
    lines = textwrap.wrap(policy.replace(",", ", "), _LABEL, max_lines=2 if at else 3, placeholder=" ...")
    if not lines[1:]:
        return name
    return "\n".join([*lines, at + placement] if at else lines)
