"""What communication costs a step: both doors beside FSDP2 on the simulated accelerator, with stated costs.

    python benchmarks/overlap.py                # all cases, 2 ranks, about 3 minutes
    python benchmarks/overlap.py --case PCIe    # those whose name contains it

Nothing here is measured on this machine: times are simulated (`tests/sim/costs.py` has the model of costs), so they are
the same everywhere. The losses of all engines must be equal first. Needs what `tests/sim` needs: a C++ compiler.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import record
import report
import torch
import torch.distributed as dist
import torch.multiprocessing

sys.path.insert(0, str(record.ROOT))

from tests import sim
from tests.sim import overlap

TOLERANCE = 1e-4
"""Of losses, relative, with clipping: norms are summed in another order. Without it they are equal bit for bit."""


def main() -> None:
    options = _parse()
    cases = [case for case in overlap.CASES if options.case in case.name]
    if sim.why_missing():
        sys.exit(f"The simulated accelerator {sim.why_missing()}.")
    if not cases:
        sys.exit(f"No case contains {options.case!r}: {', '.join(case.name for case in overlap.CASES)}")
    sim.build()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [case.name for case in cases], options.world, folder
        torch.multiprocessing.spawn(_rank, arguments, nprocs=options.world)
        runs = json.loads(Path(folder, "result").read_text())
    _check_losses(runs)
    print(tables(runs))
    if options.out:
        header = {**record.header(__file__, options), "hardware": "simulated: costs as stated in `machines`"}
        header["machines"] = {case.name: dataclasses.asdict(case.machine) for case in cases}
        record.write(record.RESULTS / options.out, header, runs=runs)


def _rank(rank: int, names: list[str], world: int, folder: str) -> None:
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    sim.load()
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("cpu:gloo,sim:sim", store=store, rank=rank, world_size=world)
    sim.watch(stacks=False)
    runs = []
    for case in (case for case in overlap.CASES if case.name in names):
        for engine in [overlap.PLAIN, *overlap.ENGINES]:
            torch.accelerator.synchronize()
            dist.barrier()
            sim.restart()
            sim.configure(0, 0.0, "serial")
            figures = dataclasses.asdict(overlap.train(engine, case))
            runs.append({"case": case.name, "engine": engine, **figures})
            if not rank:
                print(f"{case.name}: {engine} {1e3 * figures['makespan']:.2f} ms", file=sys.stderr, flush=True)
    if not rank:
        Path(folder, "result").write_text(json.dumps(runs))
    dist.barrier()


def _check_losses(runs: list[dict[str, Any]]) -> None:
    reference = {run["case"]: run for run in runs if run["engine"] == overlap.PEER}
    for run in (run for run in runs if run["engine"] != overlap.PLAIN):
        ours, expected = ({**one, "ranks": [one]} for one in (run, reference[run["case"]]))
        tolerance = TOLERANCE if "offload" in run["case"] or "steps early" in run["case"] else 0.0
        report.require_equal_losses(ours, expected, tolerance, len(run["losses"]))
        if run["num_races"]:
            sys.exit(f"{run['case']}: {run['engine']} has {run['num_races']} races.")


def tables(runs: list[dict[str, Any]]) -> str:
    """One row a case: a simulated step of each engine; ``plain`` is the model alone, the rest is what waits for it."""
    names = [overlap.PLAIN, *overlap.ENGINES]
    of = {(run["case"], run["engine"]): f"{1e3 * run['makespan']:.2f}" for run in runs}
    cases = dict.fromkeys(case for case, _ in of)
    return report.table([["ms, simulated", *names], *([case, *(of[case, name] for name in names)] for case in cases)])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2, help="number of ranks")
    parser.add_argument("--case", default="", help="run the cases whose name contains this")
    parser.add_argument("--out", help="also write a file of this name to benchmarks/results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
