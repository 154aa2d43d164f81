"""Count the instructions that an engine adds to each of many tiny units, and those of its checks, with valgrind.

    python benchmarks/micro/instructions.py          # both doors, a floor and FSDP2, 5 minutes
    python benchmarks/micro/instructions.py --each   # ours without each check alone, too, 15 minutes

The units are those of ``benchmarks/run.py --overhead``. Time there varies by a third with what else the machine does;
the number of instructions varies by a thousandth, also on a busy machine. It is not time: copies and cache misses weigh
less. A check is left out by a function that does nothing, so its call remains. What is left out is needed: the tests
notice each. valgrind must be installed (``apt install valgrind``).
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import engines
import torch
import torch.distributed as dist
from report import table
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

PLAIN, PEER = "plain", "fsdp2"
OURS = ("fairshard", "fairshard-fully-shard")
WORLD_SIZE, NUM_UNITS, WARMUP, PASSES = 8, 50, 3, 5
CHECKS = {
    "changed `requires_grad`": ["params.following:Following.follow", "params.following:Following.settle"],
    "counted writes to shards": [
        "params.registered:Registered.shard_versions",
        "params.registered:Registered.check_unchanged",
    ],
    "uncounted writes to shards": ["params.following:Following.check_values"],
    "writes to whole parameters": ["params.listing:Listing.check_unwritten", "params.listing:Listing.warn_if_written"],
    "assigned `.data`, dropped gradients": ["params.flat_param:FlatParam.begin_pass"],
    "gradients zeroed while others wait": ["params.flat_param:FlatParam.forget_zeroed"],
    "changes in the middle of a forward": ["engine.root:adopt_changes"],
    "gradients that no rank has announced": ["engine.backward:check_owed", "engine.unit:check_owed"],
    "outputs that are parameters": ["engine.unit:Unit.copied_out"],
    "order of units and gathers": ["checks.order_check:OrderCheck.note", "checks.order_check:OrderCheck.gather"],
    "counters of collectives": ["utils.collectives:Communicator.count"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=f"{','.join(OURS)},least,{PEER}", help="names, separated by commas")
    parser.add_argument("--each", action="store_true", help="leave out each check alone, too")
    parser.add_argument("--worker", nargs=2, metavar=("ENGINE", "WITHOUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        _run(*args.worker)
    if shutil.which("valgrind") is None:
        parser.error("valgrind is not installed. `apt install valgrind` brings it.")
    rows = [(PLAIN, ())]
    for name in args.engines.split(","):
        rows.append((name, ()))
        if name in OURS:
            rows += [(name, (check,)) for check in CHECKS] if args.each else []
            rows.append((name, tuple(CHECKS)))
    counts = {row: _count(*row) for row in rows}
    added = {row: count - counts[PLAIN, ()] for row, count in counts.items()}
    print(_text(added))


def _text(added: dict[tuple[str, tuple[str, ...]], float]) -> str:
    """The table of instructions ``added`` by each engine without some checks."""
    lines = [["added to plain torch", "without", "instructions per unit", f"over {PEER}", "of its own"]]
    peer = added.get((PEER, ()))
    for (name, without), number in added.items():
        if name != PLAIN:
            left_out = "all of these" if len(without) == len(CHECKS) else "".join(without)
            over = "" if peer is None else f"{number / peer:.3f}"
            lines.append([name, left_out, f"{number:,.0f}", over, f"{number / added[name, ()]:.3f}"])
    return table(lines)


def _count(engine: str, without: Iterable[str]) -> float:
    """Instructions of a forward and backward of ``engine`` per unit, without some `CHECKS`."""
    tool = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--callgrind-out-file=/dev/null"]
    worker = [sys.executable, __file__, "--worker", engine, ";".join(without)]
    fixed = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run([*tool, *worker], env={**os.environ, **fixed}, capture_output=True, text=True, check=False)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or found is None:
        raise RuntimeError(f"{engine} failed under valgrind:\n{done.stderr[-2000:]}")
    return int(found[1]) / PASSES / NUM_UNITS


def _run(engine: str, without: str) -> None:
    for check in filter(None, without.split(";")):
        for place in CHECKS[check]:
            _leave_out(place)
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    units = (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(NUM_UNITS))
    model: nn.Module = nn.Sequential(*units)
    if engine != PLAIN:
        model = engines.build(engine, model, model, engines.Options()).model
    inputs = torch.ones(2, 8)
    for number in range(WARMUP + PASSES):
        if number >= WARMUP:
            _count_from_now("on")
        model(inputs).sum().backward()
        if number >= WARMUP:
            _count_from_now("off")
        model.zero_grad()
    sys.stdout.flush()
    os._exit(0)


def _count_from_now(switch: str) -> None:
    """Turn the counting of this process ``on`` or ``off``."""
    subprocess.run(["callgrind_control", "--instr=" + switch, str(os.getpid())], check=True, capture_output=True)


def _leave_out(place: str) -> None:
    """Replace the function at ``place`` by one that returns its last argument: the tensor, where one is returned."""
    name, _, path = place.partition(":")
    owner: Any = importlib.import_module(f"fairshard.{name}")
    *classes, function = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    assert hasattr(owner, function), place
    setattr(owner, function, _last)


def _last(*args: Any, **_kwargs: Any) -> Any:
    return args[-1]


if __name__ == "__main__":
    main()
