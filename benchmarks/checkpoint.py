"""Compare ways to save and load a training run (GB/s, stall of the training thread, memory) with the raw disk.

    python benchmarks/checkpoint.py                            # gpt-109m, 1.3 GB over 2 ranks, about 8 minutes
    python benchmarks/checkpoint.py --model gpt-5m --repeat 1  # a quick check that everything runs
    python benchmarks/checkpoint.py --only load                # only what has this in its name, about 2 minutes

Every engine must first load, bit for bit, what it saved. See README.md beside this file for what is measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import record
import report
from launch import RunFailed, launch, parser_of

MIN_OF_DD = 0.85
MAX_STALL = 1.2
MIN_LOAD = 1.0
DISK = ("dd, one stream", "dd, a stream per rank")
NEXT_STEP = "steady next step"
OURS, PEER = "fairshard save", "fsdp2 + dcp save"
OUR_LOAD, PEER_LOAD = "fairshard load", "fsdp2 + dcp load"

Rows = dict[str, list[list[dict[str, Any]]]]
"""``[name][repeat][rank]``: the fields of `checkpoint_worker.Sample` without name and repeat."""


def runs_of(ranks: Sequence[Any]) -> list[dict[str, Any]]:
    """Group what the ranks measured at the same time: ``{"name", "repeat", "ranks"}``."""
    runs = []
    for samples in zip(*(rank["samples"] for rank in ranks), strict=True):
        common = {key: samples[0][key] for key in ("name", "repeat")}
        runs.append({**common, "ranks": [{key: own[key] for key in own if key not in common} for own in samples]})
    return runs


def rows_of(runs: Sequence[Any]) -> Rows:
    """Arrange runs by name and repeat."""
    rows: Rows = {}
    for run in sorted(runs, key=lambda run: run["repeat"]):
        rows.setdefault(run["name"], []).append(run["ranks"])
    return rows


def slowest(rows: Rows, name: str, part: str | None = None) -> list[float]:
    """Seconds of the slowest rank, by repeat."""
    return [max(rank["seconds"] if part is None else rank["parts"][part] for rank in ranks) for ranks in rows[name]]


def speed_table(rows: Rows) -> str:
    """GB/s of everything that moves all bytes, and its ratio to both readings of dd in the same repeat."""
    over = [f"over {name}" for name in (*DISK, "fsdp2 + dcp")]
    table = [["", "s", "CPU s a rank", "GB/s", *over, "peak extra MiB a rank"]]
    for name, samples in rows.items():
        if "async" in name:
            continue
        seconds = slowest(rows, name)
        nbytes = sum(rank["nbytes"] for rank in samples[0])
        speed = report.Spread.of(nbytes / own / 1e9 for own in seconds)
        others = ("", "", PEER_LOAD) if name.endswith("load") else (*DISK, PEER)
        ratios = [speed_over(rows, name, other).show(2) if other in rows else "" for other in others]
        cpu = report.Spread.of(max(rank["cpu_seconds"] for rank in ranks) for ranks in samples)
        cells = [report.Spread.of(seconds).show(2), cpu.show(2), speed.show(2)]
        table.append([name, *cells, *ratios, _peak(samples)])
    return report.table(table)


def stall_table(rows: Rows) -> str:
    """How long a background save stalls training, and its ratio to a copy of the same bytes in memory."""
    header = [
        "",
        "memcpy ms",
        "first stall ms",
        "stall ms",
        "over memcpy",
        "next step waits ms",
        "peak extra MiB a rank",
    ]
    table = [header]
    for name in (name for name in rows if "async" in name):
        cells = [_ms(rows, name, part) for part in ("memcpy", "first stall", "steady stall")]
        next_step = _ms(rows, name, NEXT_STEP) if NEXT_STEP in rows[name][0][0]["parts"] else ""
        table.append([name, *cells, stall_over_memcpy(rows, name).show(2), next_step, _peak(rows[name])])
    return report.table(table)


def speed_over(rows: Rows, name: str, other: str) -> report.Spread:
    """Speed as a multiple of the speed of ``other``, repeat by repeat."""
    return report.Spread.of(b / a for a, b in zip(slowest(rows, name), slowest(rows, other), strict=True))


def stall_over_memcpy(rows: Rows, name: str) -> report.Spread:
    """The ratio of a steady save's stall to the copy made just before it, repeat by repeat."""
    stalls, copies = (slowest(rows, name, part) for part in ("steady stall", "memcpy"))
    return report.Spread.of(stall / copy for stall, copy in zip(stalls, copies, strict=True))


def verdicts(rows: Rows, full: dict[str, int]) -> str:
    """Say of each target whether the medians reach it, against the better reading of dd."""
    load = speed_over(rows, OUR_LOAD, PEER_LOAD).median
    disk = min(speed_over(rows, OURS, other).median for other in DISK)
    peer = speed_over(rows, OURS, PEER).median
    need = 1.0 if disk >= MIN_OF_DD else 1.2
    stall = stall_over_memcpy(rows, "fairshard async").median
    extra, result, unit = (full[key] / 2**20 for key in ("peak_extra", "result", "unit"))
    terms = f"result {result:.1f} + unit {unit:.1f} = {result + unit:.1f} MiB"
    return "\n".join(
        [
            f"save over dd: {disk:.2f} (target {MIN_OF_DD}: {_met(disk >= MIN_OF_DD)})",
            f"save over FSDP2 + DCP: {peer:.2f} (target {need}: {_met(peer >= need)})",
            f"load over FSDP2 + DCP: {load:.2f} (target {MIN_LOAD}: {_met(load >= MIN_LOAD)})",
            f"async stall over memcpy: {stall:.2f} (target {MAX_STALL}: {_met(stall <= MAX_STALL)})",
            f"full state dict, peak extra on rank 0: {extra:.1f} MiB (target {terms}: {_met(extra <= result + unit)})",
        ]
    )


def _met(is_met: bool) -> str:
    return "met" if is_met else "NOT met"


def _ms(rows: Rows, name: str, part: str) -> str:
    return report.Spread.of(1e3 * seconds for seconds in slowest(rows, name, part)).show(0)


def _peak(samples: Sequence[Sequence[Any]]) -> str:
    return report.Spread.of(max(rank["peak_extra_bytes"] for rank in ranks) / 2**20 for ranks in samples).show(0)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, model="gpt-109m", repeat=7, timeout=1800.0)
    parser.add_argument("--only", default="", help="measure only what has this in its name; prints one table")
    options = parser.parse_args(argv)
    if min(options.world, options.repeat, options.threads) < 1:
        parser.error("--world, --repeat and --threads must be at least 1")
    options.out = options.out or record.result_file("checkpoint", options)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="fairshard-bench-", dir=options.folder) as folder:
        job = {key: getattr(options, key) for key in ("model", "world", "threads", "repeat", "only")}
        try:
            ranks = launch("checkpoint_worker.py", {**job, "folder": folder}, options.world, options.timeout)
        except RunFailed as error:
            raise SystemExit(f"error: {error}") from None
    runs = runs_of(ranks)
    rows = rows_of(runs)
    print("what was loaded is what was saved\n\n" + speed_table(rows))
    if not options.only:
        print("\n" + stall_table(rows))
        print("\n" + verdicts(rows, ranks[0]["full_state_dict"]))
    load = {"before": load_before, "after": os.getloadavg()}
    print("\nload of the machine: {before}, {after} afterwards".format(**load))
    totals = [{key: rank[key] for key in ("nbytes", "full_state_dict")} for rank in ranks]
    header = {**record.header(__file__, options, argv), "load": load, "ranks": totals}
    record.write(options.out, header, runs=runs)
    print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
