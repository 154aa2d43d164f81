"""Where the CPU time of a step goes, by kind of work, for engines that step in turns under Linux's ``perf``.

    python benchmarks/lanes.py                                                   # a step of gpt-29m, 4 minutes
    python benchmarks/lanes.py --overhead --engines fairshard,fairshard-fully-shard,fsdp2    # of a tiny unit
    python benchmarks/lanes.py --load --model gpt-109m                           # of loading a checkpoint

Each sample is counted once, by its functions (`STEP`, `OVERHEAD`, `LOAD`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import engines
import overhead
import report
from launch import World, launch, launch_in_turns
from models import MODELS
from perf import LOAD_HZ, OVERHEAD_HZ, STEP_HZ, Lane, sort
from worker import UNSAMPLED

OVERHEAD_PASSES = 150
LOADS = 5
TIMEOUT_S = 1800

KERNEL_MEMORY = r"page_fault|do_munmap|unmap_region|zap_|madvise|do_mmap|brk"
SOCKETS = r"gloo|tcp_|sock_|sendmsg|recvmsg|epoll|futex|eventfd"
PYTHON = r"\(/[^)]*/(lib)?python3[^/)]*\)$"
COLLECTOR = r"gc_collect|deduce_unreachable|visit_decref|visit_reachable|subtract_refs"

STEP = (
    Lane("page faults, unmapping", anywhere=KERNEL_MEMORY),
    Lane("sockets, threads of gloo", anywhere=SOCKETS),
    Lane("matrix products", anywhere=r"[sd]gemm|gemm_|cblas|mkl_blas|dnnl|bf16_gemm|_gemm"),
    Lane("AdamW", anywhere=r"adamw?_|fused_adam|_fused_adamw"),
    Lane("copies and sums", anywhere=r"copy_kernel|copy_impl|memcpy|memmove|foreach_|cat_|add_kernel|add_stub"),
    Lane("Python", innermost=PYTHON),
)
"""What `worker.py` spends: the first lane that takes a sample has it."""

OVERHEAD = (
    Lane("garbage collector", anywhere=COLLECTOR),
    Lane("fake group", anywhere=r"FakeProcessGroup|fake_pg"),
    Lane("Python's interpreter", innermost=PYTHON),
    Lane("system calls and faults", innermost=r"\[kernel|\[unknown\] \(\[k"),
    Lane("malloc and free", innermost=r"\(.*/libc[.-][^)]*\)$"),
    Lane("torch, called by Python", innermost=r"libtorch_python"),
    Lane("torch's operators", innermost=r"libtorch_cpu|libc10|libtorch"),
)
"""What `overhead.py` spends."""


LOAD = (
    Lane("page faults, unmapping", anywhere=KERNEL_MEMORY),
    Lane("reading files", anywhere=r"vfs_read|pread|filemap_|ksys_read|fadvise"),
    Lane("checksums", anywhere=r"crc32"),
    Lane("sockets, threads of gloo", anywhere=SOCKETS),
    Lane("copies", anywhere=r"copy_kernel|copy_impl|memcpy|memmove|foreach_|cat_"),
    Lane("garbage collector", anywhere=COLLECTOR),
    Lane("Python", innermost=PYTHON),
)
"""What a load spends in `checkpoint_worker.py`."""


class Spent(NamedTuple):
    """Samples of each engine, and how they are shown."""

    unit: str
    lanes: Sequence[Lane]
    samples: dict[str, Counter[str]]
    factor: float

    def table(self) -> str:
        rows = [["", *self.samples]]
        for name in [*(lane.name for lane in self.lanes), "the rest"]:
            rows.append([name, *(f"{counts[name] * self.factor:.0f}" for counts in self.samples.values())])
        rows.append(["all", *(f"{counts.total() * self.factor:.0f}" for counts in self.samples.values())])
        return f"{self.unit}, CPU time of rank 0\n\n{report.table(rows)}"


def of_steps(options: argparse.Namespace, folder: str) -> Spent:
    """Train all engines in turns."""
    job = {"model": options.model, "precision": "fp32", "world": 2, "steps": options.steps, "count": False}
    samples = _in_turns("worker.py", job, 2, options.engines, folder, STEP)
    return Spent("ms of a step", STEP, samples, 1e3 / STEP_HZ / (options.steps - UNSAMPLED))


def of_units(options: argparse.Namespace, folder: str) -> Spent:
    """Run tiny units of all engines, and of torch alone, in turns."""
    names = [overhead.PLAIN, *options.engines]
    samples = _in_turns("overhead.py", {"passes": OVERHEAD_PASSES}, 1, names, folder, OVERHEAD)
    return Spent("us of a unit", OVERHEAD, samples, 1e6 / OVERHEAD_HZ / (OVERHEAD_PASSES * overhead.NUM_UNITS))


def of_loads(options: argparse.Namespace, folder: str) -> Spent:
    """Load checkpoints that have been dropped from the page cache."""
    job = {"model": options.model, "world": 2, "threads": 1, "repeat": LOADS, "only": " load"}
    launch("checkpoint_worker.py", {**job, "folder": folder, "perf": folder}, 2, TIMEOUT_S)
    samples: dict[str, Counter[str]] = {}
    for path in sorted(Path(folder).glob("*.perf")):
        samples.setdefault(path.stem.rpartition("-")[0], Counter()).update(sort(path, LOAD))
    return Spent("ms of a load", LOAD, samples, 1e3 / LOAD_HZ / LOADS)


def _in_turns(
    script: str, job: Mapping[str, Any], world: int, names: Sequence[str], folder: str, lanes: Sequence[Lane]
) -> dict[str, Counter[str]]:
    paths = {name: Path(folder, f"{name}.perf") for name in names}
    worlds = [World({**job, "threads": 1, "engine": name, "perf": str(path)}) for name, path in paths.items()]
    launch_in_turns(script, worlds, world, TIMEOUT_S)
    return {name: sort(path, lanes) for name, path in paths.items()}


def main() -> int:
    options = _parse()
    with tempfile.TemporaryDirectory(prefix="fairshard-lanes-") as folder:
        measure = of_units if options.overhead else of_loads if options.load else of_steps
        print(measure(options, folder).table())
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="ddp,fairshard,fairshard-fully-shard,fsdp2")
    parser.add_argument("--overhead", action="store_true", help="tiny units on a fake group instead of steps")
    parser.add_argument("--load", action="store_true", help="loads of a checkpoint, ours and DCP's, instead of steps")
    parser.add_argument("--model", choices=MODELS, default="gpt-29m")
    parser.add_argument("--steps", type=int, default=40, help="steps of a run, three of warm-up included")
    options = parser.parse_args()
    options.engines = options.engines.split(",")
    unknown = [name for name in options.engines if name not in engines.ADAPTERS]
    if unknown:
        parser.error(f"unknown engines {', '.join(unknown)}; there are {', '.join(engines.ADAPTERS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
