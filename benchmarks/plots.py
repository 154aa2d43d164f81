"""Draws the results in ``results/`` for the docs, light and dark.

    python benchmarks/plots.py            # writes docs/_static/plots/NAME-light.svg and NAME-dark.svg
    python benchmarks/plots.py step       # one of them

Each plot names the command and the date of the figures in it. `PLOTS` says which files they are from.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import record
import report

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


@contextmanager
def style(mode: str) -> Iterator[Any]:
    """pyplot with the colours of ``mode``, on no background; the same figure gives the same file."""
    import matplotlib

    matplotlib.use("svg")
    from cycler import cycler
    from matplotlib import pyplot

    chosen = MODES[mode]
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
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), chosen["text"]),
        "axes.edgecolor": chosen["text"],
        "legend.frameon": False,
    }
    with matplotlib.rc_context(settings):
        yield pyplot
        pyplot.close("all")


def save(name: str, draw: Callable[[Any], Any], folder: Path = STATIC) -> None:
    """Write the figure that ``draw(pyplot)`` returns, once for each mode."""
    folder.mkdir(exist_ok=True, parents=True)
    for mode in MODES:
        with style(mode) as pyplot:
            draw(pyplot).savefig(folder / f"{name}-{mode}.svg", metadata={"Date": None}, bbox_inches="tight")


def read(name: str) -> dict[str, Any]:
    """A file of results."""
    return record.read(record.RESULTS / name)


def source(*files: dict[str, Any]) -> str:
    """The commands and dates of the files, for below a plot."""
    return "\n".join(f"{file['generated_by'].split(' --out')[0]}   {file['date'][:10]}" for file in files)


def _under(figure: Any, text: str) -> Any:
    figure.tight_layout()
    figure.text(0.01, -0.02, text, fontsize=7.5, family="monospace", va="top")
    return figure


def _measured(file: dict[str, Any]) -> report.Figures:
    return report.by_engine(file["runs"], file["settings"]["warmup"])


RATIOS = (
    ("fairshard", "fsdp2", "2026-11-21-gpt-29m-w2.json"),
    ("fairshard", "fsdp1", "2026-11-21-gpt-29m-w2.json"),
    ("fairshard", "deepspeed", "2026-11-21-gpt-29m-w2-deepspeed.json"),
    ("fairshard", "ddp", "2026-11-21-gpt-29m-w2.json"),
    ("fairshard-fully-shard", "fsdp2", "2026-11-21-gpt-29m-w2-fully-shard.json"),
)


def ratios(pyplot: Any) -> Any:
    """Step time and peak memory of ours over each peer's."""
    figure, axes = pyplot.subplots(1, 2, figsize=(7.5, 2.7), sharey=True)
    labels = [f"{NAMES[ours].partition(', ')[2]} over {NAMES[peer]}" for ours, peer, _ in RATIOS]
    for column, (figure_name, title) in enumerate((("step ms", "step time"), ("peak MiB", "peak memory"))):
        for row, (ours, peer, name) in enumerate(RATIOS):
            found = report.ratio(_measured(read(name)), peer, figure_name, ours)
            assert found is not None
            spread = found.spread
            axes[column].plot([spread.low, spread.high], [row, row], color=f"C{column}", linewidth=2, alpha=0.6)
            axes[column].plot(spread.median, row, "o", color=f"C{column}")
            axes[column].annotate(f"{spread.median:.2f}", (spread.median, row), (0, 6), textcoords="offset points",
                                  ha="center", fontsize=8)
        axes[column].axvline(1.0, color="gray", linestyle=":")
        axes[column].set(title=title, xlim=(0.45, 1.25))
        axes[column].title.set_fontsize(10)
    axes[0].set_yticks(range(len(labels)), labels)
    axes[0].set_ylim(len(labels) - 0.5, -0.7)
    return _under(figure, source(*(read(name) for name in dict.fromkeys(name for _, _, name in RATIOS))))


STEP = "2026-11-23-gpt-29m-w2.json"


def step(pyplot: Any) -> Any:
    """The phases of a step and the peak of memory, by engine."""
    file = read(STEP)
    measured = _measured(file)
    figure, (times, memory) = pyplot.subplots(1, 2, figsize=(7.5, 2.5), sharey=True, width_ratios=(2, 1))
    names = list(measured)
    for row, engine in enumerate(names):
        left = 0.0
        for color, phase in enumerate(report.PHASES):
            spread = report.Spread.of(one[f"{phase} ms"] for one in measured[engine].values())
            times.barh(row, spread.median, left=left, color=f"C{color}", label=phase if row == 0 else None)
            left += spread.median
        peak = report.Spread.of(one["peak MiB"] for one in measured[engine].values())
        memory.barh(row, peak.median, color="C3")
        memory.annotate(f"{peak.median:.0f}", (peak.median, row), (3, 0), textcoords="offset points", va="center",
                        fontsize=8)
    times.set_yticks(range(len(names)), [NAMES[name] for name in names])
    times.invert_yaxis()
    times.set(xlabel="ms of a step, median")
    memory.set(xlabel="peak MiB of a rank", xlim=(0, memory.get_xlim()[1] * 1.15))
    times.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1), fontsize=8)
    return _under(figure, source(file))


OVERHEAD = "2026-11-23-overhead.json"


def overhead(pyplot: Any) -> Any:
    """Python's time for one unit, above plain torch."""
    file = read(OVERHEAD)
    added = report.overheads(file["overhead"], "plain")
    figure, axes = pyplot.subplots(figsize=(7.5, 2.0))
    for row, engine in enumerate(added):
        spread = report.Spread.of(one["us per unit"] for one in added[engine].values())
        axes.barh(row, spread.median, color="C0", xerr=[[spread.median - spread.low], [spread.high - spread.median]],
                  ecolor="gray")
        axes.annotate(f"{spread.median:.0f}", (spread.high, row), (4, 0), textcoords="offset points", va="center",
                      fontsize=8)
    axes.set_yticks(range(len(added)), [NAMES[name] for name in added])
    axes.invert_yaxis()
    axes.set(xlabel="microseconds of the host for a unit in a step, above plain torch")
    return _under(figure, source(file))


CHECKPOINTS = ("2026-11-21-checkpoint-gpt-109m-w2.json", "2026-11-23-checkpoint-gpt-109m-w2.json")
ENDS = {"save": (" save", "torch.save"), "load": (" load",)}


def checkpoint(pyplot: Any) -> Any:
    """Seconds of a save and of a load of 109 M parameters and their moments."""
    files = [read(name) for name in CHECKPOINTS]
    figure, axes = pyplot.subplots(1, 2, figsize=(7.5, 2.6))
    for column, (file, suffix) in enumerate(zip(files, ENDS, strict=True)):
        by_name: dict[str, list[float]] = {}
        for run in file["runs"]:
            seconds = [rank["seconds"] for rank in run["ranks"] if "seconds" in rank]
            if seconds and run["name"].endswith(ENDS[suffix]):
                by_name.setdefault(run["name"], []).append(max(seconds))
        for row, values in enumerate(by_name.values()):
            spread = report.Spread.of(values)
            axes[column].barh(row, spread.median, color=f"C{column}", ecolor="gray",
                              xerr=[[spread.median - spread.low], [spread.high - spread.median]])
        labels = [name.replace("fsdp2", "FSDP2").replace("dcp", "DCP") for name in by_name]
        axes[column].set_yticks(range(len(by_name)), labels)
        axes[column].invert_yaxis()
        axes[column].set(xlabel=f"seconds of a {suffix}")
    return _under(figure, source(*files))


OVERLAP = "2026-11-23-overlap-gpt-w2.json"
SIMULATED = {"wrapper": "fairshard, wrapper", "fully_shard": "fairshard, fully_shard", "fsdp2": "FSDP2"}


def overlap(pyplot: Any) -> Any:
    """What a simulated step takes beyond the model alone, in per cent, by case and engine."""
    file = read(OVERLAP)
    alone = {run["case"]: run["makespan"] for run in file["runs"] if run["engine"] == "plain"}
    cases = [case for case in alone if "offload" not in case and "speculates" not in case and "steps early" not in case]
    figure, axes = pyplot.subplots(figsize=(7.5, 0.45 * len(cases) + 1))
    for place, (engine, label) in enumerate(SIMULATED.items()):
        own = {run["case"]: run["makespan"] for run in file["runs"] if run["engine"] == engine}
        values = [100 * (own[case] / alone[case] - 1) for case in cases]
        rows = [row + 0.27 * (place - 1) for row in range(len(cases))]
        axes.barh(rows, values, height=0.25, color=f"C{place}", label=label)
        for row, value in zip(rows, values, strict=True):
            axes.annotate(f"{value:.0f}", (value, row), (3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks(range(len(cases)), cases)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="per cent of a step beyond the model alone (simulated)")
    axes.legend(fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    return _under(figure, source(file))


PLOTS: dict[str, Callable[[Any], Any]] = {
    "ratios": ratios,
    "step": step,
    "overhead": overhead,
    "checkpoint": checkpoint,
    "overlap": overlap,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*PLOTS, []], metavar="NAME", help="all if left out")
    names = parser.parse_args(argv).names or list(PLOTS)
    for name in names:
        save(name, PLOTS[name])
        print(f"written: {STATIC.relative_to(record.ROOT) / name}-light.svg, -dark.svg")


if __name__ == "__main__":
    main()
