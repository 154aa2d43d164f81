"""Time steps with the order of units compared never, now and then, and always; the three take turns.

    python benchmarks/micro/order_check.py --steps 100

Two ranks train three copies of one GPT, a step of each in turn, with equal losses or not at all. A ratio is of two
steps of the same turn. "check" is what the methods of `OrderCheck` take of a step, waiting included.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measure import loaded_module
from models import MODELS, build_gpt
from report import Spread, table

from fairshard.nn import FSDP

MODES = ["off", "sampled", "always"]
METHODS = ["begin_forward", "end_forward", "begin_backward", "end_backward"]


class Timed:
    """Adds up the seconds that calls of `OrderCheck` take."""

    def __init__(self) -> None:
        self.seconds = 0.0
        checks = loaded_module("order_check", "OrderCheck").OrderCheck
        for name in METHODS:
            setattr(checks, name, self._timed(getattr(checks, name)))

    def _timed(self, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return call


def measure_rank(rank: int, model: str, num_steps: int, folder: str) -> None:
    """Write seconds of each step, and of the check in it, by mode, for rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    timed = Timed()
    wrapped = {}
    for mode in MODES:
        torch.manual_seed(0)
        gpt = build_gpt(MODELS[model])
        for index, block in enumerate(gpt.blocks):
            gpt.blocks[index] = FSDP(block, order_check=mode)
        wrapped[mode] = FSDP(gpt, order_check=mode)
    optimizers = {mode: torch.optim.SGD(one.parameters(), lr=1e-3) for mode, one in wrapped.items()}
    tokens = torch.randint(0, 256, (1, 64))
    times: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    for step in range(num_steps):
        losses = []
        for mode in MODES[step % 3 :] + MODES[: step % 3]:
            timed.seconds, start = 0.0, time.perf_counter()
            loss = wrapped[mode](tokens).float().logsumexp(-1).mean()
            loss.backward()
            optimizers[mode].step()
            optimizers[mode].zero_grad()
            times[mode].append((time.perf_counter() - start, timed.seconds))
            losses.append(loss.item())
        assert len(set(losses)) == 1, losses
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps(times))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt-29m")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure_rank, (options.model, options.steps, folder), nprocs=2)
        times = json.loads(Path(folder, "times.json").read_text())
    warm = {mode: own[5:] for mode, own in times.items()}
    cells = [["order_check", "step ms", "over off", "check us a step, mean", "check us, median"]]
    for mode, own in warm.items():
        ratios = [step / off for (step, _), (off, _) in zip(own, warm["off"], strict=True)]
        checks = sorted(check * 1e6 for _, check in own)
        spreads = [Spread.of(step * 1e3 for step, _ in own).show(0), Spread.of(ratios).show(3)]
        cells.append([mode, *spreads, f"{sum(checks) / len(checks):.0f}", f"{checks[len(checks) // 2]:.0f}"])
    print(table(cells))


if __name__ == "__main__":
    main()
