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
import datetime
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
from launch import HERE, RunFailed, World, launch, launch_in_turns
from models import MODELS

REFERENCE = "ddp"
CHECK_STEPS = max(report.LOSS_STEPS, 3)
OVERHEAD_ENGINES = (*engines.OURS, engines.FLOOR, "fsdp2", "fsdp1")
OVERHEAD_PASSES = 20


class Session:
    """One run of the benchmark: what was asked for, and everything measured so far."""

    def __init__(self, options: argparse.Namespace, trees: Mapping[str, Path], argv: Sequence[str] | None = None):
        self.options = options
        self.trees = trees
        self.argv = argv
        self.failures: dict[str, str] = {}
        self.checks: dict[str, dict[str, Any]] = {}
        self.runs: list[dict[str, Any]] = []
        self.overheads: list[dict[str, Any]] = []

    def check_losses(self) -> None:
        """Train every engine a few untimed steps; count its collectives and compare its losses with DDP's."""
        for engine in [REFERENCE, *(name for name in self._variants() if name != REFERENCE)]:
            run = self._train(engine, repeat=0, steps=CHECK_STEPS, count=True)
            if run is None:
                if engine == REFERENCE:
                    raise SystemExit(f"error: no reference to compare losses with: {self.failures[engine]}")
                continue
            self.checks[engine] = run
            self._require_equal_losses(run)
            if engine != REFERENCE:
                print(f"{engine}: losses agree with {REFERENCE}'s", flush=True)

    def measure_training(self) -> None:
        """Time every engine once per repeat, so that other load on the machine affects all of them."""
        if self.options.turns:
            self._measure_in_turns()
            return
        for repeat, names in enumerate(self._rotations(self._variants())):
            for engine in names:
                run = self._train(engine, repeat, self.options.steps, count=False)
                if run is not None:
                    self._add(run)
            self.save()

    def _measure_in_turns(self) -> None:
        """As `measure_training`, with all engines at once, one of them stepping at a time."""
        options = self.options
        for repeat, names in enumerate(self._rotations(self._variants())):
            jobs = [self._job(name, options.steps, count=False) for name in names]
            for engine, ranks in self._launch_in_turns("worker.py", jobs, options.world):
                self._add({"engine": engine, "repeat": repeat, "ranks": ranks})
            self.save()

    def _add(self, run: dict[str, Any]) -> None:
        self._require_equal_losses(run)
        self.runs.append(run)
        step = report.figures(run, self.options.warmup)["step ms"]
        print(f"repeat {run['repeat'] + 1}/{self.options.repeat}: {run['engine']} {step:.0f} ms a step", flush=True)

    def measure_overhead(self) -> None:
        """Time every engine's tiny units once per repeat, and torch alone beside them."""
        measured = [name for name in self._variants() if engines.adapter_of(name) in OVERHEAD_ENGINES]
        if not measured:
            return
        common = {"passes": OVERHEAD_PASSES, "threads": self.options.threads}
        for repeat, names in enumerate(self._rotations([overhead.PLAIN, *measured])):
            jobs = [{**common, "engine": name} for name in names]
            if self.options.turns:
                results = self._launch_in_turns("overhead.py", jobs, world=1)
            else:
                results = [(job["engine"], self._launch("overhead.py", job, world=1)) for job in jobs]
            self.overheads += [
                {"engine": engine, "repeat": repeat, **ranks[0]} for engine, ranks in results if ranks is not None
            ]

    def save(self) -> None:
        """Write everything so far, raw, with the settings and the machine it was measured on."""
        header = {
            **record.header(__file__, self.options, self.argv),
            "malloc": {name: os.environ[name] for name in os.environ if name.startswith("MALLOC_")},
            "failures": self.failures,
        }
        checks = list(self.checks.values())
        record.write(self.options.out, header, loss_checks=checks, runs=self.runs, overhead=self.overheads)

    def _variants(self) -> list[str]:
        return [variant for engine in self.options.engines for variant in engines.variants(engine)]

    def _rotations(self, names: Sequence[str]) -> list[list[str]]:
        """The order of ``names`` in each repeat, each starting with another one."""
        firsts = [repeat % len(names) for repeat in range(self.options.repeat)]
        return [[*names[first:], *names[:first]] for first in firsts]

    def _job(self, engine: str, steps: int, count: bool) -> dict[str, Any]:
        options = self.options
        return {
            "engine": engine,
            "model": options.model,
            "precision": options.precision,
            "device": options.device,
            "world": options.world,
            "threads": options.threads,
            "steps": steps,
            "count": count,
        }

    def _train(self, engine: str, repeat: int, steps: int, count: bool) -> dict[str, Any] | None:
        ranks = self._launch("worker.py", self._job(engine, steps, count), self.options.world)
        return None if ranks is None else {"engine": engine, "repeat": repeat, "ranks": ranks}

    def _launch(self, script: str, job: Mapping[str, Any], world: int) -> list[dict[str, Any]] | None:
        """Launch unless this engine has failed before: a broken peer costs one timeout and stops nothing."""
        engine = job["engine"]
        if engine in self.failures:
            return None
        try:
            return launch(script, job, world, self.options.timeout, self.trees.get(engine))
        except RunFailed as error:
            self.failures[engine] = str(error)
            print(f"{engine}: failed: {error}", flush=True)
            return None

    def _launch_in_turns(
        self, script: str, jobs: Sequence[Mapping[str, Any]], world: int
    ) -> list[tuple[str, list[dict[str, Any]]]]:
        """Launch all ``jobs`` at the same time; one failure ends the benchmark, because the others wait for turns."""
        worlds = [World(job, self.trees.get(job["engine"])) for job in jobs]
        measured = launch_in_turns(script, worlds, world, self.options.timeout)
        return [(job["engine"], ranks) for job, ranks in zip(jobs, measured, strict=True)]

    def _require_equal_losses(self, run: Mapping[str, Any]) -> None:
        difference = report.loss_difference(run, self.checks[REFERENCE], self.options.precision)
        if difference is not None:
            raise SystemExit(
                f"error: engines must have equal losses for their times to be compared, but differ at {difference}. "
                "Find out which one trains differently, or leave it out of --engines."
            )


def show(path: Path) -> None:
    """Print the tables of what `Session.save` wrote, and what failed."""
    content = record.read(path)
    if not content.keys() >= {"loss_checks", "runs", "overhead"}:
        raise SystemExit(
            f"error: {path} must be a file that run.py wrote, but `{content['generated_by']}` wrote it. Pass a file "
            "from `run.py --out`."
        )
    settings = content["settings"]
    peers = [name for name in settings["engines"] if name not in engines.OURS]
    if content["runs"]:
        counted = {run["engine"]: run["ranks"][0]["collectives"] for run in content["loss_checks"]}
        measured = report.by_engine(content["runs"], settings["warmup"])
        print("\n" + report.training_tables(measured, counted, peers))
    if content["overhead"]:
        print("\n" + report.overhead_table(content["overhead"], overhead.PLAIN, peers))
    for engine, reason in content["failures"].items():
        print(f"\n{engine}: failed: {reason}")


def check_out(revision: str, folder: Path) -> Path:
    """Put the package as it was at a commit into ``folder``."""
    archive = subprocess.run(
        ["git", "archive", revision, "fairshard"], cwd=HERE.parent, check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    verbatim = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=verbatim)
    known = list(engines.ADAPTERS)
    usual = ",".join(name for name in known if name != engines.FLOOR)
    parser.add_argument("--engines", default=usual, help=f"comma-separated, of %(default)s and {engines.FLOOR}")
    parser.add_argument("--model", choices=MODELS, default="gpt-29m")
    parser.add_argument("--device", default="cpu", help="type of the ranks' devices: cpu, cuda, xpu, ...")
    parser.add_argument("--world", type=int, help="ranks, all on this machine (default: 2 on cpu, 1 on an accelerator)")
    parser.add_argument("--steps", type=int, default=12, help="steps of a run, warm-up included")
    parser.add_argument("--warmup", type=int, default=3, help="first steps of a run that are not timed")
    parser.add_argument("--repeat", type=int, default=9, help="runs of each engine, interleaved")
    parser.add_argument("--threads", type=int, default=1, help="threads of a rank")
    parser.add_argument("--precision", choices=list(report.LOSS_TOLERANCE), default="fp32")
    parser.add_argument("--against", metavar="REV", help="also measure each fairshard engine at this commit")
    parser.add_argument("--turns", action="store_true", help="run all engines at the same time, stepping in turns")
    parser.add_argument("--overhead", action="store_true", help="measure host overhead only, train nothing")
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which a run has failed")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/DATE-MODEL-wWORLD.json")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the tables of a result file, measure nothing")
    options = parser.parse_args(argv)

    options.engines = options.engines.split(",")
    unknown = [name for name in options.engines if name not in known]
    if unknown:
        parser.error(f"unknown engines {', '.join(unknown)}; there are {', '.join(known)}")
    if options.against is not None:
        former = [engines.at_commit(name, options.against) for name in options.engines if name in engines.OURS]
        if not former:
            parser.error(f"--against needs one of {', '.join(engines.OURS)} in --engines")
        options.engines += former
    if options.world is None:
        options.world = 2 if options.device == "cpu" else 1
    if options.steps <= max(options.warmup, 2):
        parser.error(f"--steps {options.steps} leaves nothing to measure: memory needs 3, time --warmup + 1")
    if min(options.world, options.repeat, options.threads) < 1:
        parser.error("--world, --repeat and --threads must be at least 1")
    if options.out is None:
        what = "overhead" if options.overhead else f"{options.model}-w{options.world}"
        what += "" if options.device == "cpu" else f"-{options.device}"
        suffix = "" if options.precision == "fp32" else f"-{options.precision}"
        suffix += "" if options.against is None else f"-against-{options.against.replace('/', '-')}"
        options.out = record.RESULTS / f"{datetime.date.today()}-{what}{suffix}.json"
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.show is not None:
        show(options.show)
        return 0
    with tempfile.TemporaryDirectory(prefix="fairshard-tree-") as folder:
        trees = {}
        if options.against is not None:
            former = check_out(options.against, Path(folder))
            trees = {name: former for name in options.engines if name.endswith(f"@{options.against}")}
        session = Session(options, trees, argv)
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
