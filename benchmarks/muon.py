"""Compare fairshard's Muon on `fully_shard` with torch's Muon on FSDP2's DTensors: the optimizer's step, and its bytes.

    python benchmarks/muon.py                                      # gpt-29m and gpt-109m, 2 and 4 ranks
    python benchmarks/muon.py --models gpt-29m --worlds 2
    python benchmarks/muon.py --models gpt-5m --worlds 2 --steps 4 --repeat 1      # does it still run?

fairshard runs twice: with its default shards, which `step` gathers to the ranks that compute, and with `Owned`
matrices, which need no gathering. All run at the same time and take turns, step by step, so that other load affects
all. Muon steps the matrices of the blocks, torch's AdamW everything else; only Muon's step is timed. Losses must be
equal first, to a relative 1e-3: over DTensors torch adds norms and products part by part, and bf16 rounds what
Newton-Schulz makes of that.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import record
import report
from launch import World, launch_in_turns

PEER, OURS, OWNED = "torch", "fairshard", "fairshard-owned"
TOLERANCE = 1e-3
"""Of losses, relative."""


def measure(options: argparse.Namespace, argv: Sequence[str] | None) -> list[dict[str, Any]]:
    """Train with both engines once per repeat; what has been measured is written after each run."""
    runs: list[dict[str, Any]] = []
    for model in options.models:
        for world in options.worlds:
            for repeat in range(options.repeat):
                names = [PEER, OURS, OWNED]
                names = [*names[repeat % 3 :], *names[: repeat % 3]]
                common = {"model": model, "world": world, "threads": options.threads, "steps": options.steps}
                worlds = [World({"engine": name, **common}) for name in names]
                measured = launch_in_turns("muon_worker.py", worlds, world, options.timeout)
                run = {"model": model, "world": world, "repeat": repeat, **dict(zip(names, measured, strict=True))}
                _require_equal_losses(run)
                runs.append(run)
                found = f"{_ratio(run, OURS):.2f}, owned {_ratio(run, OWNED):.2f}"
                print(f"{model}, {world} ranks, repeat {repeat + 1}: {found}", file=sys.stderr, flush=True)
                if options.out:
                    record.write(options.out, record.header(__file__, options, argv), runs=runs)
    return runs


def tables(runs: Sequence[dict[str, Any]]) -> str:
    """Medians and spreads of Muon's step, the bytes that a rank receives in it (the mean), and its collectives."""
    rows = [["model, ranks", "engine", "step ms", "of torch's", "MiB", "collectives"]]
    for model, world in dict.fromkeys((run["model"], run["world"]) for run in runs):
        own = [run for run in runs if (run["model"], run["world"]) == (model, world)]
        for name in (PEER, OURS, OWNED):
            step = report.Spread.of([_step_ms(run[name]) for run in own]).show(1)
            ratio = report.Spread.of([_ratio(run, name) for run in own]).show(2)
            traffic = f"{statistics.mean(rank['nbytes'] for rank in own[0][name]) / 2**20:.2f}"
            rows.append([f"{model}, {world}", name, step, ratio, traffic, str(own[0][name][0]["num_collectives"])])
    return report.table(rows)


def _ratio(run: dict[str, Any], name: str) -> float:
    return _step_ms(run[name]) / _step_ms(run[PEER])


def _step_ms(ranks: Sequence[Any]) -> float:
    """The slowest rank's time, as the median over the steps; the first two are not timed."""
    return 1e3 * statistics.median(max(times) for times in zip(*(rank["seconds"][2:] for rank in ranks), strict=True))


def _require_equal_losses(run: dict[str, Any]) -> None:
    for name in (OURS, OWNED):
        for rank, (ours, theirs) in enumerate(zip(run[name], run[PEER], strict=True)):
            for step, (loss, other) in enumerate(zip(ours["losses"], theirs["losses"], strict=True)):
                if abs(loss - other) > TOLERANCE * abs(other):
                    raise SystemExit(
                        f"error: losses must be equal, but in step {step} on rank {rank} of {run['world']}, for "
                        f"{run['model']}, {name}'s is {loss} and torch's {other}."
                    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt-29m,gpt-109m", help="of benchmarks/models.py")
    parser.add_argument("--worlds", default="2,4", help="numbers of ranks")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--steps", type=int, default=10, help="of a run; the first two are not timed")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=900)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    options.models, options.worlds = options.models.split(","), [int(world) for world in options.worlds.split(",")]
    return options


def main(argv: Sequence[str] | None = None) -> None:
    print(tables(measure(_parse(argv), argv)))


if __name__ == "__main__":
    main()
