"""Compare ways to save and load a training run (GB/s, stall of the training thread, memory) with the raw disk.

    python benchmarks/checkpoint.py                            # gpt-109m, 1.3 GB over 2 ranks, about 8 minutes
    python benchmarks/checkpoint.py --model gpt-5m --repeat 1  # a quick check that everything runs
    python benchmarks/checkpoint.py --only load                # only what has this in its name, about 2 minutes

Every engine must first load, bit for bit, what it saved. See README.md beside this file for what is measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import engines
import measure
import record
import report
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from engines.engine import Engine
from engines.placed import wrapped
from models import MODELS, build_gpt, random_batches
from rank import Rank
from runner import Job, RunFailed, options_of, parser_of, run
from torch import Tensor
from torch.distributed.checkpoint import state_dict as peer_state
from torch.distributed.tensor import DTensor

import fairshard.checkpoint

FIGURES = ("s", "CPU s", "GB/s", "peak extra MiB", "memcpy ms", "first stall ms", "stall ms", "next step ms")
PARTS = ("memcpy", "first stall", "stall", "next step")
DISK = "dd, a stream per rank"
PEER = "fsdp2 + dcp"
PAIRS = [
    ("fairshard save", DISK),
    ("fairshard save", f"{PEER} save"),
    ("fairshard load", f"{PEER} load"),
    ("fairshard async", f"{PEER} async"),
]
STEPS_BEFORE = 2
DD_BLOCK_NBYTES = 1 << 22
_ALIGNMENT = 64


class Subject:
    """A trained model with its optimizer; a subclass saves and loads it."""

    def __init__(self, engine: Engine, model: str, rank: int) -> None:
        self.model, self.optimizer = engine.model, engine.optimizer
        batches = random_batches(MODELS[model], rank)
        for _ in range(STEPS_BEFORE):
            engine.backward(engine.forward(*next(batches)), True)
            engine.step()

    def tensors(self) -> list[Tensor]:
        """Everything that this rank keeps: shards, then optimizer state."""
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        state = [value for param in params for _, value in sorted(self.optimizer.state[param].items())]
        return [_local(value) for value in [*params, *state] if isinstance(value, Tensor)]

    def check(self, name: str, load: Callable[[], Any]) -> None:
        """Change everything, ``load``, and compare with what was there."""
        expected = [tensor.clone() for tensor in self.tensors()]
        for tensor in self.tensors():
            tensor.mul_(-2)  # the padding of a shard is 0 and stays so: it is not saved
        load()
        equal = [torch.equal(tensor, other) for tensor, other in zip(self.tensors(), expected, strict=True)]
        if not all(equal):
            raise RuntimeError(f"{name}: {equal.count(False)} of {len(equal)} tensors are not what was saved")


class Ours(Subject):
    """fairshard's wrapper, at its defaults."""

    def __init__(self, model: str, rank: int, **placement: Any) -> None:
        gpt = build_gpt(MODELS[model])
        options = engines.Options()
        super().__init__(Engine(wrapped(gpt, gpt.blocks, options, **placement), options), model, rank)

    def save(self, folder: str) -> None:
        fairshard.checkpoint.save(folder, self.model, self.optimizer)

    def load(self, folder: str) -> None:
        fairshard.checkpoint.load(folder, self.model, self.optimizer)


class FSDP2(Subject):
    """FSDP2, with torch.distributed.checkpoint at its defaults: its writer syncs files, its reader checks nothing."""

    def __init__(self, model: str, rank: int) -> None:
        gpt = build_gpt(MODELS[model])
        super().__init__(engines.build("fsdp2", gpt, gpt.blocks, engines.Options()), model, rank)

    def state(self) -> dict[str, Any]:
        """The state dict, made as in torch's guide to DCP."""
        model, optimizer = peer_state.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def save(self, folder: str) -> None:
        dcp.save(self.state(), checkpoint_id=folder)

    def load(self, folder: str) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        peer_state.set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )


class Comparison:
    """All measurements of one rank."""

    def __init__(self, rank: Rank, model: str, folder: str) -> None:
        self.rank, self.folder = rank, folder
        self.ours = Ours(model, rank.rank)
        self.offloaded = Ours(model, rank.rank, cpu_offload=True)
        self.fsdp2 = FSDP2(model, rank.rank)
        self.nbytes = sum(tensor.nbytes for tensor in self.ours.tensors())
        self._mirror = torch.zeros(self.nbytes + (1 << 20), dtype=torch.uint8)  # warm: its pages are allocated
        self._kept = {"fairshard": f"{folder}/kept-fairshard", "fsdp2": f"{folder}/kept-fsdp2"}
        self.acts: dict[str, Callable[[str], dict[str, float] | None]] = {
            "dd, a stream per rank": lambda work: _dd(f"{work}.dd{rank.rank}", self.nbytes),
            "fairshard save": self.ours.save,
            "fsdp2 + dcp save": self.fsdp2.save,
            "fairshard load": lambda _: self.ours.load(self._kept["fairshard"]),
            "fsdp2 + dcp load": lambda _: self.fsdp2.load(self._kept["fsdp2"]),
            "fairshard async": lambda work: self._async(self.ours, work),
            "fairshard async, cpu_offload": lambda work: self._async(self.offloaded, work),
            "fsdp2 + dcp async": self._async_fsdp2,
        }

    def check(self) -> None:
        """Require that every engine loads what it saved, bit for bit."""
        for name, subject in (("fairshard", self.ours), ("fsdp2", self.fsdp2), ("offloaded", self.offloaded)):
            folder = self._kept.get(name, f"{self.folder}/checked")
            subject.save(folder)
            subject.check(name, partial(subject.load, folder))
        checkpointer = fairshard.checkpoint.Checkpointer(f"{self.folder}/checked-async")
        for subject in (self.ours, self.offloaded):
            checkpointer.save(1, subject.model, subject.optimizer)
            checkpointer.wait()  # because the next check changes parameters without an optimizer
            subject.check("async", partial(checkpointer.load_latest, subject.model, subject.optimizer))
        self._settle()

    def measure(self, name: str, repeat: int) -> dict[str, Any]:
        """Time one act, its CPU time (that of child processes too), and the memory that it takes."""
        work = f"{self.folder}/work"
        if name.endswith("load"):
            _drop_from_cache(self._kept[name.partition(" ")[0]])
        self._settle()
        with _peak() as peak:
            start, cpu = time.perf_counter(), _cpu_seconds()
            parts = self.acts[name](work) or {}
            seconds, cpu = time.perf_counter() - start, _cpu_seconds() - cpu
        dist.barrier()
        if self.rank.rank == 0:
            shutil.rmtree(work, ignore_errors=True)
            for file in Path(self.folder).glob("work*"):
                file.unlink()
        figures = {"seconds": seconds, "cpu_seconds": cpu, "nbytes": self.nbytes, "peak_extra_bytes": peak[0], **parts}
        return {"engine": name, "repeat": repeat, "figures": figures}

    def _settle(self) -> None:
        """Wait until the disk has finished other writes, and all ranks are here."""
        gc.collect()
        dist.barrier()
        if self.rank.rank == 0:
            os.sync()
        dist.barrier()

    def _async(self, subject: Ours, work: str) -> dict[str, float]:
        """Time a first save, which creates the buffers, and a second; after it, what the next step waits for."""
        idle = torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # steps nothing, but triggers the hooks of saves
        with fairshard.checkpoint.Checkpointer(work, keep_last=1) as checkpointer:
            stalls = []
            for step in range(2):
                self._settle()
                memcpy = self._memcpy(subject)
                stalls.append(_seconds(partial(checkpointer.save, step, subject.model, subject.optimizer)))
                next_step = _seconds(idle.step)
                checkpointer.wait()
        return {"memcpy": memcpy, "first stall": stalls[0], "stall": stalls[1], "next step": next_step}

    def _async_fsdp2(self, work: str) -> dict[str, float]:
        stalls = []
        for step in range(2):
            self._settle()
            memcpy = self._memcpy(self.fsdp2)
            start = time.perf_counter()
            under_way = dcp.async_save(self.fsdp2.state(), checkpoint_id=f"{work}/{step}")
            stalls.append(time.perf_counter() - start)
            under_way.result()
        return {"memcpy": memcpy, "first stall": stalls[0], "stall": stalls[1]}

    def _memcpy(self, subject: Subject) -> float:
        """Seconds to copy everything into warm memory, on all ranks at the same time."""
        sources = subject.tensors()
        targets, start = [], 0
        for source in sources:
            targets.append(self._mirror[start : start + source.nbytes].view(source.dtype).view(source.shape))
            start += -(-source.nbytes // _ALIGNMENT) * _ALIGNMENT
        dist.barrier()
        seconds = _seconds(lambda: [target.copy_(source) for target, source in zip(targets, sources, strict=True)])
        dist.barrier()
        return seconds


def compare(rank: Rank, model: str, repeat: int, only: str, folder: str) -> list[dict[str, Any]]:
    """Measure everything once per repeat, starting each repeat with another act."""
    comparison = Comparison(rank, model, folder)
    comparison.check()
    names = [name for name in comparison.acts if only in name]
    num = len(names)
    rotated = [(names[(number + index) % num], number) for number in range(repeat) for index in range(num)]
    return [comparison.measure(name, number) for name, number in rotated]


@contextlib.contextmanager
def _peak() -> Iterator[list[int]]:
    """Append the peak memory of the block beyond the memory held before it."""
    ctypes.CDLL(None).malloc_trim(0)  # otherwise the block would reuse memory freed before
    before = measure.resident_bytes()
    measure.reset_peak_resident()
    peak: list[int] = []
    yield peak
    peak.append(measure.peak_resident_bytes() - before)


def _dd(file: str, nbytes: int) -> None:
    command = ["dd", "if=/dev/zero", f"of={file}", f"bs={DD_BLOCK_NBYTES}", f"count={nbytes}", "iflag=count_bytes"]
    subprocess.run([*command, "conv=fsync", "status=none"], check=True)


def _drop_from_cache(folder: str) -> None:
    """Drop these files from the page cache, so that their next reader waits for the disk."""
    for file in Path(folder).iterdir():
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _seconds(act: Callable[[], Any]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def figures(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One run's figures: the slowest rank's times, all ranks' bytes, the largest rank's memory."""
    most = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
    nbytes = sum(rank["nbytes"] for rank in ranks)
    moved = {"s": most["seconds"], "CPU s": most["cpu_seconds"], "GB/s": nbytes / most["seconds"] / 1e9}
    stalls = {f"{part} ms": 1e3 * most[part] for part in PARTS if part in most}
    return {**(stalls or moved), "peak extra MiB": most["peak_extra_bytes"] / 2**20}


def runs_of(ranks: Sequence[Any]) -> list[dict[str, Any]]:
    """Group what the ranks measured at the same time: ``{"engine", "repeat", "ranks"}``."""
    return [
        {"engine": same[0]["engine"], "repeat": same[0]["repeat"], "ranks": [one["figures"] for one in same]}
        for same in zip(*ranks, strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, model="gpt-109m", repeat=7, timeout=1800.0)
    parser.add_argument("--folder", help="on the disk to measure (default: the system's temporary folder)")
    parser.add_argument("--only", default="", help="measure only what has this in its name")
    options = options_of(parser, argv)
    if options.device != "cpu":
        parser.error("--device must be cpu: this compares saves and loads of host memory")
    options.out = options.out or record.result_file("checkpoint", options.model, f"w{options.world}")
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="fairshard-bench-", dir=options.folder) as folder:
        settings = {"model": options.model, "repeat": options.repeat, "only": options.only, "folder": folder}
        job = Job("checkpoint:compare", settings, options.world, options.threads, timeout_s=options.timeout)
        try:
            (ranks,) = run(job)
        except RunFailed as error:
            raise SystemExit(f"error: {error}") from None
    runs = runs_of(ranks)
    measured: report.Figures = {}
    for one in sorted(runs, key=lambda one: one["repeat"]):
        measured.setdefault(one["engine"], {})[one["repeat"]] = figures(one["ranks"])
    print("what was loaded is what was saved\n\n" + report.figures_table(measured, FIGURES))
    print("\n" + report.ratio_table(measured, PAIRS, ("s", "stall ms")))
    header = {**record.header(__file__, options, argv), "load": {"before": load_before, "after": os.getloadavg()}}
    record.write(options.out, header, runs=runs)
    print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
