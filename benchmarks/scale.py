"""Scale on paper: memory, messages, host time and the time of a step for models of 7 to 405 billion parameters.

    python benchmarks/scale.py memory         # one table of docs/notes/scale.md; --help lists the others
    python benchmarks/scale.py page           # write all tables and plots of docs/notes/scale.md again
    python benchmarks/scale.py measure        # measure the host time that the tables use, about 2 minutes

Memory and messages come from the engine's own planner (`fairshard.nn.wrap.describe`), on the meta device. Step times
come from a model (`scaling/step_time.py`) of machines whose rates are published. No table needs an accelerator.
"""

from __future__ import annotations

import argparse
import datetime
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import plots
import record
from scaling import host
from scaling.machines import MACHINES, PUBLISHED, Machine, assumptions
from scaling.shapes import SHAPES, Shape
from scaling.step_time import StepTime, agreement_seconds, step_time
from scaling.traffic import AGREEMENT_NBYTES, GATHER, REDUCE, REPLICAS, Plan, Ranks, Traffic, plan_of, traffic_of

PAGE = record.ROOT / "docs" / "notes" / "scale.md"
PLOTTED = [8 * 2**k for k in range(12)]
WORLDS = (8, 64, 512, 2048, 16384)
GB = 1e9
FILLS = 0.9
"""Share of the memory that a rank may fill: the rest is for NCCL, kernels and fragments."""
CHOSEN = "H100"
"""The machine of tables that have one."""

Rows = list[list[str]]


def planned(shape: Shape, ranks: Ranks) -> Plan:
    """The plan of ``shape``; on an accelerator it does not depend on the number of replicas."""
    return _planned(shape, Ranks(ranks.num_shards, min(ranks.num_replicas, 2)))


@cache
def _planned(shape: Shape, ranks: Ranks) -> Plan:
    return plan_of(shape.build(), shape.block, ranks)


@cache
def traffic(shape: Shape, ranks: Ranks) -> Traffic:
    """The messages of a step of ``shape``."""
    return traffic_of(planned(shape, ranks), ranks)


@cache
def measured() -> dict[str, dict[int, float]]:
    """Host seconds per unit: ``[engine][world_size]``."""
    return host.by_engine(record.read(host.latest())["runs"])


def need(shape: Shape, ranks: Ranks) -> float:
    """Bytes of a rank: the plan's peak and activations."""
    return planned(shape, ranks).peak_nbytes + shape.activation_nbytes()


def fits(shape: Shape, ranks: Ranks, machine: Machine) -> bool:
    """Whether a rank has room for it."""
    return need(shape, ranks) <= FILLS * machine.memory_nbytes


def hybrid(shape: Shape, world_size: int, machine: Machine) -> Ranks | None:
    """The smallest group of shards, at least a node, that fits; None if only all ranks together do."""
    num_shards = machine.node_size
    while num_shards < world_size:
        ranks = Ranks(num_shards, world_size // num_shards)
        if fits(shape, ranks, machine):
            return ranks
        num_shards *= 2
    return None


def estimate(shape: Shape, ranks: Ranks, machine: Machine) -> StepTime:
    """The time of a step with the wrapper's host time."""
    return step_time(shape, traffic(shape, ranks), machine, ranks, host.at(measured()[host.WRAPPER], ranks.num_shards))


def shape_rows() -> Rows:
    rows = [["model", "parameters, 10^9", "units", "largest unit, 10^9", "batch x context", "10^15 FLOP a step, rank"]]
    for make in SHAPES.values():
        shape = make()
        units = planned(shape, Ranks(8)).units
        numels = [unit.numel / 1e9 for unit in units]
        size = [f"{sum(numels):.1f}", str(len(units)), f"{max(numels):.2f}", f"{shape.batch} x {shape.context}"]
        rows.append([shape.name, *size, f"{shape.flops() / 1e15:.2f}"])
    return rows


def memory_rows() -> Rows:
    names = ["shards", "optimizer state", "gathered units", "whole gradients", "buckets", "gradients"]
    rows = [["model", "ranks", *names, "peak of the plan", "activations", "all"]]
    for make in SHAPES.values():
        shape = make()
        for world_size in (64, 512, 16384):
            ranks = Ranks(world_size)
            plan = planned(shape, ranks)
            terms = dict.fromkeys(names, 0)
            for term in plan.terms:
                terms[term.name] += term.nbytes  # KeyError: the plan has a term that the table lacks
            sizes = [*terms.values(), plan.peak_nbytes, shape.activation_nbytes(), need(shape, ranks)]
            rows.append([shape.name, _n(world_size), *(_gb(size) for size in sizes)])
    return rows


def fit_rows() -> Rows:
    machine = MACHINES[CHOSEN]
    rows = [["model", *(f"{_n(world)} ranks" for world in WORLDS), "smallest group"]]
    for make in SHAPES.values():
        shape = make()
        cells = [_gb(need(shape, Ranks(world))) for world in WORLDS]
        fitting = next((world for world in (8 * 2**k for k in range(12)) if fits(shape, Ranks(world), machine)), None)
        rows.append([shape.name, *cells, "none" if fitting is None else str(fitting)])
    return rows


def traffic_rows() -> Rows:
    kinds = (GATHER, REDUCE, REPLICAS)
    rows = [["model", "ranks", "messages", *(f"{kind}, GB" for kind in kinds), "bytes over 2 N", "agreement, MB"]]
    for make in SHAPES.values():
        shape = make()
        for ranks in _flat_and_hybrid(shape, (64, 16384)):
            found = traffic(shape, ranks)
            nbytes = found.nbytes()
            numel = sum(unit.numel for unit in planned(shape, ranks).units)
            others = ranks.num_shards - 1 + (ranks.num_replicas - 1)
            cells = [_gb(nbytes[kind]) for kind in kinds]
            share = f"{sum(nbytes.values()) / (2 * numel):.2f}"
            agreement = f"{others * AGREEMENT_NBYTES / 1e6:.2f}"
            rows.append([shape.name, _name(ranks), str(found.count().total()), *cells, share, agreement])
    return rows


def host_rows() -> Rows:
    rows = [["ranks", "wrapper, us a unit", "fully_shard, us a unit", "gloo ring of the agreement, ms"]]
    wrapper, in_place = measured()[host.WRAPPER], measured()[host.FULLY_SHARD]
    for world in WORLDS:
        ranks = Ranks(world)
        units = (host.at(own, world) for own in (wrapper, in_place))
        seconds = agreement_seconds(MACHINES[CHOSEN], ranks)
        rows.append([_n(world), *(f"{1e6 * each.unit:.0f}" for each in units), f"{1e3 * seconds:.1f}"])
    return rows


def time_rows() -> Rows:
    machine = MACHINES[CHOSEN]
    header = ["step ms", "compute", "exposed", "messages", "host", "TFLOPS", "of the peak"]
    rows = [["model", "ranks", *header]]
    for make in SHAPES.values():
        shape = make()
        for ranks in _flat_and_hybrid(shape, (64, 512, 2048, 16384)):
            if not fits(shape, ranks, machine):
                continue
            found = estimate(shape, ranks, machine)
            parts = found.total, found.compute, found.exposed, found.messages, found.host
            tflops = found.tflops(shape, recomputes=False)
            cells = [f"{1e3 * seconds:,.0f}" for seconds in parts]
            rows.append([shape.name, _name(ranks), *cells, f"{tflops:.0f}", f"{1e12 * tflops / machine.flops:.2f}"])
    return rows


def published_rows() -> Rows:
    rows = [["source", "machine", "ranks", "batch x context", "published", "model", "off", "recomputation counted"]]
    for one in PUBLISHED:
        shape = replace(SHAPES["GPT 175B"](), batch=one.batch, context=one.context)
        found = estimate(shape, Ranks(one.num_ranks), MACHINES[one.machine])
        own, more = (found.tflops(shape, recomputes) for recomputes in (False, True))
        cells = [f"{one.batch} x {one.context}", f"{one.tflops:.0f}", f"{own:.0f}", f"{own / one.tflops - 1:+.0%}"]
        cells.append(f"{more:.0f}, {more / one.tflops - 1:+.0%}")
        rows.append([one.source, one.machine, str(one.num_ranks), *cells])
    return rows


def assumption_rows() -> Rows:
    rows: Rows = [["assumption", *MACHINES, "source"]]
    return [*rows, *([what, *values, source] for what, values, source in assumptions())]


TABLES: dict[str, Callable[[], Rows]] = {
    "assumptions": assumption_rows,
    "shapes": shape_rows,
    "memory": memory_rows,
    "fit": fit_rows,
    "traffic": traffic_rows,
    "host": host_rows,
    "time": time_rows,
    "published": published_rows,
}
"""By the name that the command takes."""


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """The rows as a Markdown table under their header."""
    header, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([header, "|" + "---|" * len(rows[0]), *body])


def with_tables(text: str) -> str:
    """``text`` with the table below each command of this script replaced by what the command prints."""

    def renewed(match: re.Match[str]) -> str:
        return f"{match[1]}{markdown(TABLES[match[2]]())}\n"

    pattern = r"(```\n\$ python benchmarks/scale\.py (\w+)[^\n]*\n```\n\n)(?:\|[^\n]*\n)*"
    return re.sub(pattern, renewed, text)


def draw_time(pyplot: Any) -> Any:
    """Modelled TFLOPS of a rank by the number of ranks."""
    machine = MACHINES[CHOSEN]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for color, make in enumerate(SHAPES.values()):
        shape = make()
        flat = [Ranks(world) for world in PLOTTED if fits(shape, Ranks(world), machine)]
        pairs = [ranks for world in PLOTTED if (ranks := hybrid(shape, world, machine))]
        for ranks, line, label in ((flat, "-", shape.name), (pairs, "--", None)):
            tflops = [estimate(shape, each, machine).tflops(shape, False) for each in ranks]
            axes.plot([each.world_size for each in ranks], tflops, line, label=label, color=f"C{color}")
    axes.set(xscale="log", xlabel="ranks", ylabel="TFLOPS a rank", title=f"{CHOSEN}: flat (solid), hybrid (dashed)")
    return _ticked(figure, axes)


def draw_memory(pyplot: Any) -> Any:
    """Planned memory of a rank by the number of ranks."""
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for color, make in enumerate(SHAPES.values()):
        shape = make()
        axes.plot(PLOTTED, [need(shape, Ranks(world)) / GB for world in PLOTTED], label=shape.name, color=f"C{color}")
    axes.axhline(FILLS * MACHINES[CHOSEN].memory_nbytes / GB, color="gray", linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="ranks, flat", ylabel="GB a rank", title="Memory, with activations")
    return _ticked(figure, axes)


def _ticked(figure: Any, axes: Any) -> Any:
    axes.set_xticks(PLOTTED[::2], [_n(world) for world in PLOTTED[::2]])
    axes.minorticks_off()
    axes.legend(fontsize="small")
    figure.tight_layout()
    return figure


def _flat_and_hybrid(shape: Shape, worlds: Sequence[int]) -> list[Ranks]:
    pairs = [(Ranks(world), hybrid(shape, world, MACHINES[CHOSEN])) for world in worlds]
    return [ranks for pair in pairs for ranks in pair if ranks is not None]


def _name(ranks: Ranks) -> str:
    return f"{_n(ranks.num_replicas)} x {ranks.num_shards}" if ranks.is_hybrid else _n(ranks.world_size)


def _n(number: int) -> str:
    return f"{number:,}"


def _gb(nbytes: float) -> str:
    return f"{nbytes / GB:.4g}" if nbytes < 1000 * GB else f"{nbytes / GB:,.0f}"


def main(argv: Sequence[str] | None = None) -> None:
    verbatim = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=verbatim)
    parser.add_argument("what", choices=[*TABLES, "page", "measure"])
    parser.add_argument("--repeat", type=int, default=5, help="measurements of each figure, with `measure`")
    options = parser.parse_args(argv)
    if options.what == "measure":
        path = record.RESULTS / f"{datetime.date.today()}-scale-host.json"
        record.write(path, record.header(__file__, options, argv), runs=host.measure(options.repeat))
        print(f"written: {path}")
    elif options.what == "page":
        PAGE.write_text(with_tables(PAGE.read_text()))
        plots.save("scale-time", draw_time)
        plots.save("scale-memory", draw_memory)
    else:
        print(markdown(TABLES[options.what]()))


if __name__ == "__main__":
    main()
