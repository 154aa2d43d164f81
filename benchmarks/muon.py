"""Compare fairshard's Muon on `fully_shard` with torch's Muon on FSDP2's DTensors: the optimizer's step, and its bytes.

    python benchmarks/muon.py                                 # gpt-29m, 2 ranks
    python benchmarks/muon.py --model gpt-109m --world 4
    python benchmarks/muon.py --model gpt-5m --steps 4 --repeat 1      # does it still run?

fairshard runs twice: with its default shards, which `step` gathers to the ranks that compute, and with `Owned`
matrices, which need no gathering. All run at the same time and take turns, step by step, so that other load affects
all. Muon steps the matrices of the blocks, torch's AdamW everything else; only Muon's step is timed. Losses must be
equal first, to a relative 1e-3: over DTensors torch adds norms and products part by part, and bf16 rounds what
Newton-Schulz makes of that.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

import record
import report
from engines.muon import NAMES
from runner import Job, options_of, parser_of, repeated

PEER = "torch"
TOLERANCE = 1e-3
"""Of losses, relative."""
WARMUP = 2


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, repeat=3)
    parser.add_argument("--steps", type=int, default=10, help=f"of a run; the first {WARMUP} are not timed")
    options = options_of(parser, argv)
    settings = {"model": options.model, "steps": options.steps, "counts": "optimizer"}
    job = {"world": options.world, "threads": options.threads, "device": options.device, "timeout_s": options.timeout}
    jobs = {name: Job("training:train", {**settings, "engine": f"muon/{name}"}, **job) for name in NAMES}
    runs: list[dict[str, Any]] = []
    for run in repeated(jobs, options.repeat, {}, in_turns=True):
        runs.append(run)
        if options.out:
            record.write(options.out, record.header(__file__, options, argv), runs=runs)
    reference = next(run for run in runs if run["engine"] == PEER)
    for run in runs:
        report.require_equal_losses(run, reference, TOLERANCE, options.steps)
    measured = {
        name: {run["repeat"]: {"step ms": report.slowest_ms(run, WARMUP, "optimizer")} for run in own}
        for name in NAMES
        if (own := [run for run in runs if run["engine"] == name])
    }
    traffic = {run["engine"]: _traffic(run["ranks"]) for run in runs}
    print(report.figures_table(measured, ["step ms"], {"": ("collectives", "MiB received"), **traffic}))
    print("\n" + report.ratio_table(measured, [(name, PEER) for name in NAMES if name != PEER], ["step ms"]))
    return 0


def _traffic(ranks: Sequence[Any]) -> tuple[str, str]:
    """Collectives of a step, and the mean of what a rank receives, because owners receive more than others."""
    shown = [report.traffic(rank["collectives"]) for rank in ranks]
    return shown[0][0], f"{statistics.mean(float(nbytes) for _, nbytes in shown):.2f}"


if __name__ == "__main__":
    sys.exit(main())
