"""Compare ways to save and load a training run (GB/s, stall of the training thread, memory) with the raw disk.

    python benchmarks/checkpoint.py                            # gpt-109m, 1.3 GB over 2 ranks, about 8 minutes
    python benchmarks/checkpoint.py --model gpt-5m --repeat 1  # a quick check that everything runs
    python benchmarks/checkpoint.py --only load                # only what has this in its name, about 2 minutes

Every engine must first load, bit for bit, what it saved. See README.md beside this file for what is measured.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import record
import report
from runner import Job, RunFailed, options_of, parser_of, run

FIGURES = ("s", "CPU s", "GB/s", "peak extra MiB", "memcpy ms", "first stall ms", "stall ms", "next step ms")
PARTS = ("memcpy", "first stall", "stall", "next step")
DISK = ("dd, one stream", "dd, a stream per rank")
PEER = "fsdp2 + dcp"
PAIRS = [
    *(("fairshard save", other) for other in (*DISK, f"{PEER} save")),
    ("fairshard load", f"{PEER} load"),
    ("fairshard async", f"{PEER} async"),
]


def figures(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One run's figures: the slowest rank's times, all ranks' bytes, the largest rank's memory."""
    most = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
    nbytes = sum(rank["nbytes"] for rank in ranks)
    moved = {"s": most["seconds"], "CPU s": most["cpu_seconds"], "GB/s": nbytes / most["seconds"] / 1e9}
    stalls = {f"{part} ms": 1e3 * most[part] for part in PARTS if part in most}
    return {**(stalls or moved), "peak extra MiB": most["peak_extra_bytes"] / 2**20}


def runs_of(ranks: Sequence[Any]) -> list[dict[str, Any]]:
    """Group what the ranks measured at the same time: ``{"engine", "repeat", "ranks"}``."""
    return [
        {"engine": same[0]["engine"], "repeat": same[0]["repeat"], "ranks": [one["figures"] for one in same]}
        for same in zip(*ranks, strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, model="gpt-109m", repeat=7, timeout=1800.0)
    parser.add_argument("--folder", help="on the disk to measure (default: the system's temporary folder)")
    parser.add_argument("--only", default="", help="measure only what has this in its name")
    options = options_of(parser, argv)
    if options.device != "cpu":
        parser.error("--device must be cpu: this compares saves and loads of host memory")
    options.out = options.out or record.result_file("checkpoint", options.model, f"w{options.world}")
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="fairshard-bench-", dir=options.folder) as folder:
        settings = {"model": options.model, "repeat": options.repeat, "only": options.only, "folder": folder}
        job = Job("checkpointing:compare", settings, options.world, options.threads, timeout_s=options.timeout)
        try:
            (ranks,) = run(job)
        except RunFailed as error:
            raise SystemExit(f"error: {error}") from None
    runs = runs_of(ranks)
    measured: report.Figures = {}
    for one in sorted(runs, key=lambda one: one["repeat"]):
        measured.setdefault(one["engine"], {})[one["repeat"]] = figures(one["ranks"])
    print("what was loaded is what was saved\n\n" + report.figures_table(measured, FIGURES))
    print("\n" + report.ratio_table(measured, PAIRS, ("s", "stall ms")))
    header = {**record.header(__file__, options, argv), "load": {"before": load_before, "after": os.getloadavg()}}
    record.write(options.out, header, runs=runs)
    print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
