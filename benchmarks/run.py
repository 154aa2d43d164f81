"""Compare fairshard with other engines: step time, collectives, memory, and host overhead per unit.

    python benchmarks/run.py                                  # gpt-29m, all engines, 9 repeats
    python benchmarks/run.py --model gpt-109m --engines fairshard,fsdp2
    python benchmarks/run.py --overhead                       # host overhead only
    python benchmarks/run.py --device cuda --model gpt-1.3b --precision bf16    # on one GPU
    python benchmarks/run.py --engines fairshard,fairshard-fully-shard --against v0.1.0    # with a former fairshard
    python benchmarks/run.py ... --against v0.1.0 --turns     # on a noisy machine: step by step, not run by run
    python benchmarks/run.py --show benchmarks/results/FILE   # the tables of a former run

See README.md beside this file for what is measured and how to read it.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import engines
import overhead
import record
import report
from runner import HERE, Job, names_in, options_of, parser_of, repeated

REFERENCE = "ddp"
CHECK_STEPS = max(report.LOSS_STEPS, 3)
NOT_TINY = ("ddp", "deepspeed", "plain")
"""Engines that do not shard unit by unit, so their overhead per unit says nothing."""
OVERHEAD_PASSES = 20


class Session:
    """One run of the benchmark: what was asked for, and everything measured so far."""

    def __init__(self, options: argparse.Namespace, tree: str, argv: Sequence[str] | None = None):
        self.options = options
        self.argv = argv
        self.failures: dict[str, str] = {}
        self.checks: dict[str, dict[str, Any]] = {}
        self.runs: list[dict[str, Any]] = []
        self.overheads: list[dict[str, Any]] = []
        self._tree = tree
        self._tolerance = report.LOSS_TOLERANCE[options.precision]
        self._variants = [variant for engine in options.engines for variant in engines.variants(engine)]

    def check_losses(self) -> None:
        """Train every engine a few untimed steps; count its collectives and compare its losses with DDP's."""
        names = [REFERENCE, *(name for name in self._variants if name != REFERENCE)]
        for run in repeated(self._training(names, CHECK_STEPS, "step"), 1, self.failures):
            self.checks[run["engine"]] = run
            if REFERENCE in self.checks:
                report.require_equal_losses(run, self.checks[REFERENCE], self._tolerance)
                print(f"{run['engine']}: losses agree with {REFERENCE}'s", flush=True)
        if REFERENCE not in self.checks:
            raise SystemExit(f"error: no reference to compare losses with: {self.failures[REFERENCE]}")

    def measure_training(self) -> None:
        """Time every engine once per repeat."""
        options = self.options
        names = [name for name in self._variants if name not in self.failures]
        for run in repeated(self._training(names, options.steps, ""), options.repeat, self.failures, options.turns):
            report.require_equal_losses(run, self.checks[REFERENCE], self._tolerance)
            self.runs.append(run)
            step = report.figures(run, options.warmup)["step ms"]
            print(f"repeat {run['repeat'] + 1}/{options.repeat}: {run['engine']} {step:.0f} ms a step", flush=True)
            self.save()

    def measure_overhead(self) -> None:
        """Time every engine's tiny units once per repeat, and torch alone beside them."""
        options = self.options
        names = [name for name in self._variants if engines.adapter_of(name) not in (*NOT_TINY, *self.failures)]
        jobs = {
            name: self._job(name, "overhead:measure", {"engine": name, "passes": OVERHEAD_PASSES}, is_fake=True)
            for name in ([overhead.PLAIN, *names] if names else [])
        }
        for run in repeated(jobs, options.repeat, self.failures, options.turns):
            (figures,) = run.pop("ranks")
            self.overheads.append({**run, **figures})

    def save(self) -> None:
        """Write everything so far, raw, with the settings and the machine it was measured on."""
        header = {
            **record.header(__file__, self.options, self.argv),
            "malloc": {name: os.environ[name] for name in os.environ if name.startswith("MALLOC_")},
            "failures": self.failures,
        }
        checks = list(self.checks.values())
        record.write(self.options.out, header, loss_checks=checks, runs=self.runs, overhead=self.overheads)

    def _training(self, names: Sequence[str], steps: int, counts: str) -> dict[str, Job]:
        options = self.options
        settings = {"model": options.model, "precision": options.precision, "steps": steps, "counts": counts}
        return {name: self._job(name, "training:train", {**settings, "engine": name}) for name in names}

    def _job(self, name: str, worker: str, settings: Mapping[str, Any], is_fake: bool = False) -> Job:
        options = self.options
        world, device = (1, "cpu") if is_fake else (options.world, options.device)
        job = {"world": world, "device": device, "threads": options.threads, "timeout_s": options.timeout}
        tree = {"tree": self._tree} if "@" in name else {}
        return Job(worker, settings, is_fake=is_fake, **job, **tree)


def show(path: Path) -> None:
    """Print the tables of what `Session.save` wrote, and what failed."""
    content = record.read(path)
    if not content.keys() >= {"loss_checks", "runs", "overhead"}:
        raise SystemExit(
            f"error: {path} must be a file that run.py wrote, but `{content['generated_by']}` wrote it. Pass a file "
            "from `run.py --out`."
        )
    settings = content["settings"]
    pairs = report.pairs_of([name for name in settings["engines"] if name not in engines.OURS])
    if content["runs"]:
        measured = report.by_engine(content["runs"], settings["warmup"])
        counted = {run["engine"]: report.traffic(run["ranks"][0]["collectives"]) for run in content["loss_checks"]}
        beside = {"": ("collectives", "MiB received"), **counted}
        print("\n" + report.figures_table(measured, report.FIGURES, beside))
        print("\n" + report.ratio_table(measured, pairs, report.FIGURES))
    if content["overhead"]:
        measured = report.overheads(content["overhead"], overhead.PLAIN)
        print("\nadded to plain torch:\n" + report.figures_table(measured, list(report.OVERHEADS)))
        print("\n" + report.ratio_table(measured, pairs, list(report.OVERHEADS)))
    for engine, reason in content["failures"].items():
        print(f"\n{engine}: failed: {reason}")


def check_out(revision: str, folder: str) -> None:
    """Put the package as it was at a commit into ``folder``."""
    command = ["git", "archive", revision, "fairshard"]
    archive = subprocess.run(command, cwd=HERE.parent, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, repeat=9)
    usual = ",".join(engines.COMPARED)
    parser.add_argument("--engines", default=usual, help="comma-separated, of %(default)s, least and plain")
    parser.add_argument("--steps", type=int, default=12, help="steps of a run, warm-up included")
    parser.add_argument("--warmup", type=int, default=3, help="first steps of a run that are not timed")
    parser.add_argument("--precision", choices=list(report.LOSS_TOLERANCE), default="fp32")
    parser.add_argument("--against", metavar="REV", help="also measure each fairshard engine at this commit")
    parser.add_argument("--turns", action="store_true", help="run all engines at the same time, stepping in turns")
    parser.add_argument("--overhead", action="store_true", help="measure host overhead only, train nothing")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the tables of a result file, measure nothing")
    options = options_of(parser, argv)
    options.engines = names_in(parser, options.engines, engines.ADAPTERS)
    if options.against is not None:
        former = [engines.at_commit(name, options.against) for name in options.engines if name in engines.OURS]
        if not former:
            parser.error(f"--against needs one of {', '.join(engines.OURS)} in --engines")
        options.engines += former
    if options.steps <= max(options.warmup, 2):
        parser.error(f"--steps {options.steps} leaves nothing to measure: memory needs 3, time --warmup + 1")
    if options.out is None:
        parts = ["overhead"] if options.overhead else [options.model, f"w{options.world}"]
        parts += [part for part in (options.device, options.precision) if part not in ("cpu", "fp32")]
        parts += [] if options.against is None else ["against", options.against.replace("/", "-")]
        options.out = record.result_file(*parts)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.show is not None:
        show(options.show)
        return 0
    with tempfile.TemporaryDirectory(prefix="fairshard-tree-") as folder:
        if options.against is not None:
            check_out(options.against, folder)
        session = Session(options, folder, argv)
        if not options.overhead:
            session.check_losses()
            session.measure_training()
        if options.overhead or options.device == "cpu":  # it is Python's, and measured without a device
            session.measure_overhead()
        session.save()
    show(options.out)
    print(f"\nwritten: {options.out}")
    return 1 if any(name in session.failures for name in engines.OURS) else 0


if __name__ == "__main__":
    sys.exit(main())
