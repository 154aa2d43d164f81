"""Draws the results in ``results/`` for the docs, light and dark.

    python benchmarks/plots.py            # writes docs/_static/plots/NAME-light.svg and NAME-dark.svg

Each plot names the command and the date of the figures in it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import record
import report
from training import PHASES

STATIC = record.ROOT / "docs" / "_static" / "plots"
LIGHT = ["#2563eb", "#16a34a", "#c2410c", "#7c3aed", "#0e7490", "#be185d", "#57534e"]
DARK = ["#60a5fa", "#4ade80", "#fb923c", "#c4b5fd", "#67e8f9", "#f9a8d4", "#d6d3d1"]
MODES = {
    "light": {"text": "#1f2937", "grid": "#d1d5db", "colors": LIGHT},
    "dark": {"text": "#e5e7eb", "grid": "#4b5563", "colors": DARK},
}
NAMES = {
    "fairshard": "fairshard, wrapper",
    "fairshard-fully-shard": "fairshard, fully_shard",
    "fsdp2": "FSDP2",
    "fsdp2-prefetch": "FSDP2, explicit prefetch",
    "fsdp1": "FSDP1",
    "fsdp1-prefetch": "FSDP1, explicit prefetch",
    "ddp": "DDP (not sharded)",
    "deepspeed": "DeepSpeed ZeRO-3",
}
SMALL = {"fontsize": 8, "textcoords": "offset points"}


def save(name: str, draw: Callable[[Any], tuple[Any, str]], folder: Path = STATIC) -> None:
    """Write the figure that ``draw(pyplot)`` returns with its sources, in each mode; always to the same bytes."""
    import matplotlib

    matplotlib.use("svg")
    from cycler import cycler
    from matplotlib import pyplot

    folder.mkdir(exist_ok=True, parents=True)
    for mode, chosen in MODES.items():
        text = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor")
        settings = {
            "svg.hashsalt": "fairshard",
            "svg.fonttype": "none",
            "font.family": "sans-serif",
            "font.size": 10,
            "axes.prop_cycle": cycler(color=chosen["colors"]),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": chosen["grid"],
            "grid.linewidth": 0.6,
            "savefig.transparent": True,
            "legend.frameon": False,
            **dict.fromkeys(text, chosen["text"]),
        }
        with matplotlib.rc_context(settings):
            figure, source = draw(pyplot)
            figure.tight_layout()
            figure.text(0.01, -0.02, source, fontsize=7.5, family="monospace", va="top")
            figure.savefig(folder / f"{name}-{mode}.svg", metadata={"Date": None}, bbox_inches="tight")
            pyplot.close("all")


def read(name: str) -> tuple[dict[str, Any], str]:
    """A file of results, and the command and date of it, for below a plot."""
    file = record.read(record.RESULTS / name)
    return file, f"{file['generated_by'].split(' --out')[0]}   {file['date'][:10]}"


RATIOS = (
    ("fairshard", "fsdp2", "2026-11-21-gpt-29m-w2.json"),
    ("fairshard", "fsdp1", "2026-11-21-gpt-29m-w2.json"),
    ("fairshard", "deepspeed", "2026-11-21-gpt-29m-w2-deepspeed.json"),
    ("fairshard", "ddp", "2026-11-21-gpt-29m-w2.json"),
    ("fairshard-fully-shard", "fsdp2", "2026-11-21-gpt-29m-w2-fully-shard.json"),
)


def ratios(pyplot: Any) -> tuple[Any, str]:
    """Step time and peak memory of ours over each peer's."""
    figure, both = pyplot.subplots(1, 2, figsize=(7.5, 2.7), sharey=True)
    shown = {"step ms": "step time", "peak MiB": "peak memory"}
    for column, (axes, name) in enumerate(zip(both, shown, strict=True)):
        for row, (ours, peer, path) in enumerate(RATIOS):
            file, _ = read(path)
            found = report.ratio(report.by_engine(file["runs"], file["settings"]["warmup"]), peer, name, ours)
            assert found is not None
            axes.plot([found.spread.low, found.spread.high], [row, row], color=f"C{column}", linewidth=2, alpha=0.6)
            axes.plot(found.spread.median, row, "o", color=f"C{column}")
            axes.annotate(f"{found.spread.median:.2f}", (found.spread.median, row), (0, 6), ha="center", **SMALL)
        axes.axvline(1.0, color="gray", linestyle=":")
        axes.set(title=shown[name], xlim=(0.45, 1.25))
        axes.title.set_fontsize(10)
    labels = [f"{NAMES[ours].partition(', ')[2]} over {NAMES[peer]}" for ours, peer, _ in RATIOS]
    both[0].set_yticks(range(len(labels)), labels)
    both[0].set_ylim(len(labels) - 0.5, -0.7)
    return figure, "\n".join(dict.fromkeys(read(path)[1] for _, _, path in RATIOS))


def step(pyplot: Any) -> tuple[Any, str]:
    """The phases of a step and the peak of memory, by engine."""
    file, source = read("2026-11-23-gpt-29m-w2.json")
    measured = report.by_engine(file["runs"], file["settings"]["warmup"])
    figure, (times, memory) = pyplot.subplots(1, 2, figsize=(7.5, 2.5), sharey=True, width_ratios=(2, 1))
    for row, repeats in enumerate(measured.values()):
        median = {name: report.Spread.of(one[name] for one in repeats.values()).median for name in report.FIGURES}
        left = 0.0
        for color, phase in enumerate(PHASES):
            width = median[f"{phase} ms"]
            times.barh(row, width, left=left, color=f"C{color}", label=phase if row == 0 else None)
            left += width
        peak = median["peak MiB"]
        memory.barh(row, peak, color="C3")
        memory.annotate(f"{peak:.0f}", (peak, row), (3, 0), va="center", **SMALL)
    times.set_yticks(range(len(measured)), [NAMES[name] for name in measured])
    times.invert_yaxis()
    times.set(xlabel="ms of a step, median")
    memory.set(xlabel="peak MiB of a rank", xlim=(0, memory.get_xlim()[1] * 1.15))
    times.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1), fontsize=8)
    return figure, source


def overhead(pyplot: Any) -> tuple[Any, str]:
    """Python's time for one unit, above plain torch."""
    file, source = read("2026-11-23-overhead.json")
    added = report.overheads(file["overhead"], "plain")
    figure, axes = pyplot.subplots(figsize=(7.5, 2.0))
    for row, repeats in enumerate(added.values()):
        spread = report.Spread.of(one["us per unit"] for one in repeats.values())
        ends = [[spread.median - spread.low], [spread.high - spread.median]]
        axes.barh(row, spread.median, color="C0", xerr=ends, ecolor="gray")
        axes.annotate(f"{spread.median:.0f}", (spread.high, row), (4, 0), va="center", **SMALL)
    axes.set_yticks(range(len(added)), [NAMES[name] for name in added])
    axes.invert_yaxis()
    axes.set(xlabel="microseconds of the host for a unit in a step, above plain torch")
    return figure, source


if __name__ == "__main__":
    for draw in (ratios, step, overhead):
        save(draw.__name__, draw)
        print(f"written: {STATIC.relative_to(record.ROOT) / draw.__name__}-light.svg, -dark.svg")
