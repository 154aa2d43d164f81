"""Compare ways to train with shards and optimizer state in host memory: step time, memory, idle share of the GPU.

    python benchmarks/offload.py                                   # this machine's CPUs, a small model, 2 ranks
    python benchmarks/offload.py --device cuda --model gpt-1.3b    # one GPU, bf16, activation checkpointing
    python benchmarks/offload.py --device cuda --model gpt-1.3b --accumulate 8

Every step clips the norm of all gradients exactly. Losses are compared first: fairshard's must be equal bit for bit
whatever the placement, a peer's to a relative 1e-4 (2e-2 in bf16). See README.md beside this file.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import record
import report
from launch import RunFailed, launch

REFERENCE = "none"
VARIANTS = {
    "plain": "plain PyTorch on the device, not sharded",
    "none": "fairshard, no offload",
    "offload": "fairshard, cpu_offload, CPUOptimizer after the backward",
    "overlap": "fairshard, cpu_offload, CPUOptimizer during the backward, no clipping",
    "torch-adamw": "fairshard, cpu_offload, torch's fused AdamW",
    "master": "fairshard, move_grads_to_cpu only",
    "held": "fairshard, cpu_offload, gradients on the device",
    "fsdp2": "FSDP2 with CPUOffloadPolicy",
    "fsdp1": "FSDP1 with CPUOffload",
    "deepspeed": "DeepSpeed ZeRO-3 with optimizer and parameter offload, DeepSpeedCPUAdam",
}
SETTINGS = ("model", "device", "world", "threads", "steps", "accumulate")
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}


def measure(options: argparse.Namespace, argv: Sequence[str] | None) -> dict[str, Any]:
    """Train every variant once per repeat, interleaved; the first repeat also decides which variants have failed.

    What has been measured is written after each run.
    """
    runs: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    for repeat in range(options.repeat):
        first = repeat % len(options.variants)
        for name in [*options.variants[first:], *options.variants[:first]]:
            if name in failures:
                continue
            job = {"variant": name, **{key: getattr(options, key) for key in SETTINGS}}
            try:
                ranks = launch("offload_worker.py", job, options.world, options.timeout)
            except RunFailed as error:
                failures[name] = str(error)
                print(f"{name}: failed: {error}", flush=True)
            else:
                runs.append({"variant": name, "repeat": repeat, "ranks": ranks})
                print(f"repeat {repeat + 1}/{options.repeat}: {name} {_step_ms(ranks):.0f} ms", flush=True)
            record.write(options.out, {**record.header(__file__, options, argv), "failures": failures}, runs=runs)
    return {"runs": runs, "failures": failures}


def by_variant(runs: Sequence[Any]) -> dict[str, list[Any]]:
    """Arrange the ranks of all runs: ``[variant][repeat][rank]``, variants in their usual order."""
    ordered = sorted(runs, key=lambda run: (list(VARIANTS).index(run["variant"]), run["repeat"]))
    return {name: [run["ranks"] for run in own] for name, own in groupby(ordered, lambda run: run["variant"])}


def require_equal_losses(runs: dict[str, list[Any]], precision: str) -> None:
    """Raise SystemExit if a variant's losses differ from the reference's."""
    expected = [rank["losses"] for rank in runs[REFERENCE][0]]
    for name, repeats in runs.items():
        for ranks in repeats:
            for own, other in zip((rank["losses"] for rank in ranks), expected, strict=True):
                if name in ("plain", "fsdp1", "fsdp2", "deepspeed"):
                    pairs = zip(own[:3], other[:3], strict=True)
                    close = all(abs(a - b) <= TOLERANCE[precision] * abs(b) for a, b in pairs)
                else:
                    close = own == other
                if not close:
                    raise SystemExit(f"error: losses of {name} differ from those of {REFERENCE}: {own} {other}")


def tables(runs: dict[str, list[Any]]) -> str:
    """Medians and spreads of every variant, and the ratio of its step to the reference's."""
    rows = [["variant", "step ms", f"over {REFERENCE}", "optimizer ms", "peak MiB", "device idle"]]
    base = [_step_ms(ranks) for ranks in runs[REFERENCE]]
    for name, repeats in runs.items():
        steps = [_step_ms(ranks) for ranks in repeats]
        ratios = [step / other for step, other in zip(steps, base, strict=False)]
        optimizer = [max(rank["optimizer_ms"] for rank in ranks) for ranks in repeats]
        peaks = [max(rank["peak_bytes"] for rank in ranks) / 2**20 for ranks in repeats]
        idle = [ranks[0]["idle"] for ranks in repeats if ranks[0]["idle"] is not None]
        rows.append(
            [
                name,
                report.Spread.of(steps).show(0),
                report.Spread.of(ratios).show(2),
                report.Spread.of(optimizer).show(0),
                report.Spread.of(peaks).show(0),
                report.Spread.of(idle).show(2) if idle else "",
            ]
        )
    return report.table(rows)


def bounds(ranks: Sequence[Any]) -> str:
    """What no engine can beat on a GPU: bytes over measured bandwidths, all of them printed."""
    limits = ranks[0].get("limits")
    if not limits:
        return ""
    return "\n".join(f"{name}: {value:.3g}" for name, value in limits.items())


def _step_ms(ranks: Sequence[Any]) -> float:
    return max(rank["step_ms"] for rank in ranks)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    verbatim = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=verbatim)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated, of %(default)s")
    parser.add_argument("--model", default="gpt-5m", help="of benchmarks/models.py")
    parser.add_argument("--device", default="cpu", help="type of the ranks' devices: cpu, cuda, xpu, ...")
    parser.add_argument("--world", type=int, help="ranks (default: 2 on cpu, 1 on an accelerator)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10, help="of a run; the first three are not timed")
    parser.add_argument("--accumulate", type=int, default=1, help="backwards a step")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    options.variants = options.variants.split(",")
    unknown = [name for name in options.variants if name not in VARIANTS]
    if unknown:
        parser.error(f"unknown variants {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    if REFERENCE not in options.variants:
        parser.error(f"{REFERENCE} must be among the variants: its losses are what others are compared with")
    options.world = options.world or (2 if options.device == "cpu" else 1)
    if options.world > 1:
        options.variants = [name for name in options.variants if name != "plain"]
    if options.out is None:
        what = f"offload-{options.device}-{options.model}-w{options.world}-a{options.accumulate}"
        options.out = record.RESULTS / f"{datetime.date.today()}-{what}.json"
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    measured = measure(options, argv)
    runs = by_variant(measured["runs"])
    require_equal_losses(runs, "fp32" if options.device == "cpu" else "bf16")
    print("\nlosses agree\n\n" + tables(runs))
    print(bounds(runs[REFERENCE][0]))
    for name, reason in measured["failures"].items():
        print(f"{name} ({VARIANTS[name]}): failed: {reason}")
    print(f"\nwritten: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
