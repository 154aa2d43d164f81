"""Compare ways to train with shards and optimizer state in host memory: step time and memory.

    python benchmarks/offload.py                                   # this machine's CPUs, a small model, 2 ranks
    python benchmarks/offload.py --device cuda --model gpt-1.3b    # one GPU, bf16, activation checkpointing
    python benchmarks/offload.py --device cuda --model gpt-1.3b --accumulate 8

Every step but those of "overlap" clips the norm of all gradients exactly. Losses are compared first: those of
fairshard that clip must be equal bit for bit whatever the placement, a peer's to a relative 1e-4 (2e-2 in bf16). See
README.md beside this file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import record
import report
from runner import Job, names_in, options_of, parser_of, repeated

REFERENCE = "none"
VARIANTS = {
    "plain": ("plain", "plain PyTorch on the device, not sharded"),
    "none": ("placed/none", "fairshard, no offload"),
    "offload": ("placed/offload", "fairshard, cpu_offload, CPUOptimizer after the backward"),
    "overlap": ("placed/overlap", "fairshard, cpu_offload, CPUOptimizer during the backward, no clipping"),
    "torch-adamw": ("placed/torch-adamw", "fairshard, cpu_offload, torch's fused AdamW"),
    "master": ("placed/master", "fairshard, move_grads_to_cpu only"),
    "held": ("placed/held", "fairshard, cpu_offload, gradients on the device"),
    "fsdp2": ("fsdp2", "FSDP2 with CPUOffloadPolicy"),
    "fsdp1": ("fsdp1", "FSDP1 with CPUOffload"),
    "deepspeed": ("deepspeed", "DeepSpeed ZeRO-3 with optimizer and parameter offload, DeepSpeedCPUAdam"),
}
"""Name, engine, description."""
WARMUP = 3
FIGURES = ("step ms", "optimizer ms", "peak MiB")


def measure(options: argparse.Namespace, argv: Sequence[str] | None) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Train every variant once per repeat; what has been measured is written after each run."""
    common = {"model": options.model, "steps": options.steps, "precision": options.precision, "is_offloaded": True}
    job = {"world": options.world, "threads": options.threads, "device": options.device, "timeout_s": options.timeout}
    settings = {**common, "accumulate": options.accumulate}
    jobs = {name: Job("training:train", {**settings, "engine": VARIANTS[name][0]}, **job) for name in options.variants}
    runs: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    for run in repeated(jobs, options.repeat, failures):
        runs.append(run)
        print(f"repeat {run['repeat'] + 1}/{options.repeat}: {run['engine']}", flush=True)
        record.write(options.out, {**record.header(__file__, options, argv), "failures": failures}, runs=runs)
    return runs, failures


def require_equal_losses(runs: Sequence[Mapping[str, Any]], precision: str) -> None:
    """Raise SystemExit if a variant's losses differ from the reference's."""
    reference = next((run for run in runs if run["engine"] == REFERENCE), None)
    if reference is None:
        raise SystemExit(f"error: `{REFERENCE}` failed, and its losses are what others are compared with.")
    for run in runs:
        is_ours = VARIANTS[run["engine"]][0].startswith("placed/")
        limits = (0.0, len(reference["ranks"][0]["losses"])) if is_ours else (report.LOSS_TOLERANCE[precision],)
        if run["engine"] != "overlap":  # without clipping only the first loss is the same
            report.require_equal_losses(run, reference, *limits)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, model="gpt-5m", repeat=5)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated, of %(default)s")
    parser.add_argument("--steps", type=int, default=10, help="of a run; the first three are not timed")
    parser.add_argument("--accumulate", type=int, default=1, help="backwards a step")
    options = options_of(parser, argv)
    options.variants = names_in(parser, options.variants, VARIANTS)
    if REFERENCE not in options.variants:
        parser.error(f"{REFERENCE} must be among the variants: its losses are what others are compared with")
    if options.steps <= WARMUP:
        parser.error(f"--steps {options.steps} leaves nothing to measure: the first {WARMUP} are not timed")
    if options.world > 1:
        options.variants = [name for name in options.variants if name != "plain"]
    options.precision = "fp32" if options.device == "cpu" else "bf16"
    parts = "offload", options.device, options.model, f"w{options.world}", f"a{options.accumulate}"
    options.out = options.out or record.result_file(*parts)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    runs, failures = measure(options, argv)
    require_equal_losses(runs, options.precision)
    measured = report.by_engine(runs, WARMUP)
    measured = {name: measured[name] for name in VARIANTS if name in measured}
    print("\nlosses agree\n\n" + report.figures_table(measured, FIGURES))
    print("\n" + report.ratio_table(measured, [(name, REFERENCE) for name in measured], FIGURES))
    for name, reason in failures.items():
        print(f"{name} ({VARIANTS[name][1]}): failed: {reason}")
    print(f"\nwritten: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
