"""The CPU step alone: nanoseconds per element of AdamW over shards, beside torch's fused call on one flat tensor.

    python benchmarks/micro/cpu_adamw.py                     # this machine as it is
    python benchmarks/micro/cpu_adamw.py --busy              # with one core kept busy by another process

`CPUOptimizer` steps the shards of a wrapped model in a group of one rank; DeepSpeedCPUAdam is measured where it is
installed. All are timed in turn, repeat by repeat; read the medians of their ratios.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parents[1]))
import record
from report import Spread, table

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.optim import CPUOptimizer

NUM_UNITS, DIM = 30, 1000


def fairshard_step(threads: int) -> Callable[[], object]:
    """A step of `CPUOptimizer` over 30 units of a million elements, in host memory."""
    units = [FSDP(nn.Linear(DIM, DIM, bias=False), cpu_offload=True) for _ in range(NUM_UNITS)]
    model = FSDP(nn.Sequential(*units), cpu_offload=True)
    optimizer = CPUOptimizer(model, torch.optim.AdamW, lr=1e-4, num_threads=threads)
    model(torch.zeros(1, DIM)).sum().backward()
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    return optimizer.step


def fused_step(threads: int) -> Callable[[], object]:
    """A step of torch's fused AdamW over one tensor of the same size."""
    param = nn.Parameter(torch.randn(NUM_UNITS * DIM * DIM))
    param.grad = torch.randn_like(param)
    return torch.optim.AdamW([param], lr=1e-4, fused=True).step


def foreach_step(threads: int) -> Callable[[], object]:
    """A step of torch's AdamW as its users get it by default on the CPU, over the same shards."""
    params = [nn.Parameter(torch.randn(DIM * DIM)) for _ in range(NUM_UNITS)]
    for param in params:
        param.grad = torch.randn_like(param)
    return torch.optim.AdamW(params, lr=1e-4).step


def deepspeed_step(threads: int) -> Callable[[], object]:
    """A step of DeepSpeedCPUAdam over one tensor of the same size."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    param = nn.Parameter(torch.randn(NUM_UNITS * DIM * DIM))
    param.grad = torch.randn_like(param)
    return DeepSpeedCPUAdam([param], lr=1e-4, adamw_mode=True).step


CANDIDATES = {
    "CPUOptimizer": fairshard_step,
    "torch fused, one tensor": fused_step,
    "torch default, shards": foreach_step,
    "DeepSpeedCPUAdam": deepspeed_step,
}


def measure(threads: int, repeat: int) -> dict[str, list[float]]:
    """Nanoseconds per element of each candidate, in each repeat."""
    torch.set_num_threads(threads)
    steps = {}
    for name, build in CANDIDATES.items():
        try:
            steps[name] = build(threads)
        except Exception as error:
            print(f"{name}: not measured: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
    for step in steps.values():
        step()
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeat):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(1e9 * (time.perf_counter() - start) / (NUM_UNITS * DIM * DIM))
    return times


def show(times: dict[str, list[float]]) -> str:
    """A table of medians, spreads, and the ratio to the fused call on one tensor."""
    base = times["torch fused, one tensor"]
    rows = [["", "ns an element", "over torch fused"]]
    for name, own in times.items():
        ratio = Spread.of(a / b for a, b in zip(own, base, strict=True))
        rows.append([name, Spread.of(own).show(2), f"{statistics.median(own) / statistics.median(base):.2f} "
                     f"[{ratio.low:.2f}..{ratio.high:.2f}]"])
    return table(rows)


def _spin() -> None:
    while True:
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--repeat", type=int, default=21)
    parser.add_argument("--busy", action="store_true", help="keep one core busy meanwhile")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    busy = multiprocessing.Process(target=_spin, daemon=True)
    if options.busy:
        busy.start()
    runs = []
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    for threads in map(int, options.threads.split(",")):
        times = measure(threads, options.repeat)
        runs += [{"threads": threads, "step": name, "ns_per_element": own} for name, own in times.items()]
        print(f"\n{threads} threads{', one core busy' if options.busy else ''}\n{show(times)}")
    dist.destroy_process_group()
    if options.busy:
        busy.terminate()
    name = f"{datetime.date.today()}-cpu-adamw{'-busy' if options.busy else ''}.json"
    out = options.out or record.RESULTS / name
    record.write(out, {**record.header(__file__, options), "elements": NUM_UNITS * DIM * DIM}, runs=runs)
    print(f"\nwritten: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
