"""One rank of the comparison of checkpoints: ``python checkpoint_worker.py JOB``, with `Job` as JSON.

All engines are built in the same ranks, so that what is compared is measured within seconds of each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import engines
import measure
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from engines.engine import Engine, wrap_children
from models import MODELS, build_gpt, random_batches
from perf import LOAD_HZ, Samples
from rank_job import RankJob, seconds_of
from torch import Tensor
from torch.distributed.checkpoint import state_dict as peer_state
from torch.distributed.tensor import DTensor

import fairshard.checkpoint
from fairshard.nn import FullStateDictConfig, StateDictType
from fairshard.nn import FullyShardedDataParallel as FSDP

STEPS_BEFORE = 2
DD_BLOCK_NBYTES = 1 << 22
_ALIGNMENT = 64


@dataclass(frozen=True)
class Job(RankJob):
    """What `launch` hands to a rank."""

    repeat: int
    only: str
    folder: str
    """A folder on the disk under test."""
    perf: str = ""
    """Folder for samples of rank 0's work; see `lanes.py`."""


@dataclass
class Sample:
    """One measurement on one rank. ``parts`` are the seconds of its parts, where these matter."""

    name: str
    repeat: int
    seconds: float
    cpu_seconds: float
    """Of all threads and child processes; the kernel's write-back is not counted."""
    nbytes: int
    peak_extra_bytes: int
    parts: dict[str, float] = field(default_factory=dict)


class Subject:
    """A trained model with its optimizer; a subclass saves and loads it."""

    def __init__(self, engine: Engine, job: Job) -> None:
        self.model = engine.model
        self.optimizer = engine.optimizer
        batches = random_batches(MODELS[job.model], job.rank)
        for _ in range(STEPS_BEFORE):
            engine.backward(engine.forward(*next(batches)))
            engine.step()

    def tensors(self) -> list[Tensor]:
        """Everything that this rank keeps: shards, then optimizer state."""
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        state = [value for param in params for _, value in sorted(self.optimizer.state[param].items())]
        return [_local(value) for value in [*params, *state] if isinstance(value, Tensor)]


class Ours(Subject):
    """fairshard, at its defaults."""

    def __init__(self, job: Job, **placement: Any) -> None:
        gpt = build_gpt(MODELS[job.model])
        wrap_children(gpt.blocks, lambda block: FSDP(block, **placement))
        super().__init__(Engine(FSDP(gpt, **placement)), job)

    def save(self, folder: str) -> None:
        fairshard.checkpoint.save(folder, self.model, self.optimizer)

    def load(self, folder: str, **options: Any) -> None:
        fairshard.checkpoint.load(folder, self.model, self.optimizer, **options)


class FSDP2(Subject):
    """FSDP2, with torch.distributed.checkpoint at its defaults: its writer syncs files, its reader checks nothing."""

    def __init__(self, job: Job) -> None:
        gpt = build_gpt(MODELS[job.model])
        super().__init__(engines.build("fsdp2", gpt, gpt.blocks, engines.Options()), job)

    def state(self, **options: Any) -> dict[str, Any]:
        """The state dict, made as in torch's guide to DCP."""
        chosen = peer_state.StateDictOptions(**options)
        model = peer_state.get_model_state_dict(self.model, options=chosen)
        optimizer = peer_state.get_optimizer_state_dict(self.model, self.optimizer, options=chosen)
        return {"model": model, "optim": optimizer}

    def save(self, folder: str) -> None:
        dcp.save(self.state(), checkpoint_id=folder)

    def load(self, folder: str) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        peer_state.set_model_state_dict(self.model, state["model"])
        peer_state.set_optimizer_state_dict(self.model, self.optimizer, state["optim"])

    def save_full(self, file: str) -> dict[str, float]:
        """Gather everything on rank 0, which writes one file and syncs it."""
        start = time.perf_counter()
        state = self.state(full_state_dict=True, cpu_offload=True)
        gathered = time.perf_counter()
        if dist.get_rank() == 0:
            with open(file, "wb") as stream:
                torch.save(state, stream)
                stream.flush()
                os.fsync(stream.fileno())
        return {"gather": gathered - start, "torch.save": time.perf_counter() - gathered}


class Comparison:
    """All measurements of one rank."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.samples: list[Sample] = []
        self.ours = Ours(job)
        self.offloaded = Ours(job, cpu_offload=True)
        self.fsdp2 = FSDP2(job)
        self.nbytes = sum(tensor.nbytes for tensor in self.ours.tensors())
        self._mirror = torch.zeros(self.nbytes + (1 << 20), dtype=torch.uint8)  # warm: its pages are allocated
        self.kept = {"fairshard": f"{job.folder}/kept-fairshard", "fsdp2": f"{job.folder}/kept-fsdp2"}
        self.acts: dict[str, Callable[[str], dict[str, float] | None]] = {
            "dd, one stream": self._dd_one,
            "dd, a stream per rank": self._dd_each,
            "fairshard save": self.ours.save,
            "fsdp2 + dcp save": self.fsdp2.save,
            "fsdp2 full dict, torch.save": self.fsdp2.save_full,
            "fairshard load": lambda _: self.ours.load(self.kept["fairshard"]),
            "fsdp2 + dcp load": lambda _: self.fsdp2.load(self.kept["fsdp2"]),
            "fairshard async": lambda work: self._async(self.ours, work),
            "fairshard async, cpu_offload": lambda work: self._async(self.offloaded, work),
            "fsdp2 + dcp async": self._async_fsdp2,
        }

    def check(self) -> None:
        """Require that every engine loads what it saved, bit for bit."""
        for name, subject in (("fairshard", self.ours), ("fsdp2", self.fsdp2), ("offloaded", self.offloaded)):
            folder = self.kept.get(name, f"{self.job.folder}/checked")
            subject.save(folder)
            _require_restored(name, subject, lambda subject=subject, folder=folder: subject.load(folder))
        checkpointer = fairshard.checkpoint.Checkpointer(f"{self.job.folder}/checked-async")
        for subject in (self.ours, self.offloaded):
            checkpointer.save(1, subject.model, subject.optimizer)
            checkpointer.wait()  # because the next check changes parameters without an optimizer
            _require_restored(
                "async", subject, lambda subject=subject: checkpointer.load_latest(subject.model, subject.optimizer)
            )
        self._settle()

    def full_state_dict(self) -> dict[str, int]:
        """The peak memory of the full state dict on rank 0, and its limit: the result and one unit."""
        config = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
        with _peak() as peak, FSDP.state_dict_type(self.ours.model, StateDictType.FULL_STATE_DICT, config):
            result = self.ours.model.state_dict()
        plain = build_gpt(MODELS[self.job.model])
        block, whole = (sum(param.nbytes for param in module.parameters()) for module in (plain.blocks[0], plain))
        root = whole - len(plain.blocks) * block
        nbytes = sum(tensor.nbytes for tensor in result.values())
        return {"peak_extra": peak[0], "result": nbytes, "unit": max(block, root)}

    def measure(self) -> None:
        """Time everything once per repeat, starting each repeat with another entry."""
        names = [name for name in self.acts if self.job.only in name]
        for repeat in range(self.job.repeat):
            first = repeat % len(names)
            for name in [*names[first:], *names[:first]]:
                self._measure(name, repeat)

    def _measure(self, name: str, repeat: int) -> None:
        work = f"{self.job.folder}/work"
        if name.endswith("load"):
            _drop_from_cache(self.kept[name.partition(" ")[0]])
        self._settle()
        parts: dict[str, float] = {}
        is_sampled = self.job.perf and self.job.rank == 0
        samples = Samples(f"{self.job.perf}/{name}-{repeat}.perf" if is_sampled else "", LOAD_HZ)
        samples.start()
        dist.barrier()
        with _peak() as peak:
            cpu = _cpu_seconds()
            seconds = seconds_of(lambda: parts.update(self.acts[name](work) or {}))
            cpu = _cpu_seconds() - cpu
        samples.stop()
        self.samples.append(Sample(name, repeat, seconds, cpu, self.nbytes, peak[0], parts))
        dist.barrier()
        if self.job.rank == 0:
            shutil.rmtree(work, ignore_errors=True)
            for file in Path(self.job.folder).glob("work*"):
                file.unlink()

    def _settle(self) -> None:
        """Wait until the disk has finished other writes, and all ranks are here."""
        gc.collect()
        dist.barrier()
        if self.job.rank == 0:
            os.sync()
        dist.barrier()

    def _dd_one(self, work: str) -> None:
        if self.job.rank == 0:
            _dd(f"{work}.dd", self.nbytes * self.job.world)

    def _dd_each(self, work: str) -> None:
        _dd(f"{work}.dd{self.job.rank}", self.nbytes)

    def _async(self, subject: Ours, work: str) -> dict[str, float]:
        """Time a first save, which creates the buffers, and a second; after each, time what the next step waits for."""
        parts: dict[str, float] = {}
        idle = torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # steps nothing, but triggers the hooks of saves
        with fairshard.checkpoint.Checkpointer(work, keep_last=1) as checkpointer:
            for step, name in enumerate(("first", "steady")):
                self._settle()
                parts["memcpy"] = self._memcpy(subject)  # the copy before the steady save is kept
                parts[f"{name} stall"] = seconds_of(
                    lambda step=step: checkpointer.save(step, subject.model, subject.optimizer)
                )
                parts[f"{name} next step"] = seconds_of(idle.step)
                parts[f"{name} rest"] = seconds_of(checkpointer.wait)
        return parts

    def _async_fsdp2(self, work: str) -> dict[str, float]:
        parts: dict[str, float] = {}
        for step, name in enumerate(("first", "steady")):
            self._settle()
            parts["memcpy"] = self._memcpy(self.fsdp2)
            started: list[Any] = []
            parts[f"{name} stall"] = seconds_of(
                lambda step=step, started=started: started.append(
                    dcp.async_save(self.fsdp2.state(), checkpoint_id=f"{work}/{step}")
                )
            )
            parts[f"{name} rest"] = seconds_of(started[0].result)
        return parts

    def _memcpy(self, subject: Subject) -> float:
        """Seconds to copy everything into warm memory, on all ranks at the same time."""
        sources = subject.tensors()
        targets, start = [], 0
        for source in sources:
            targets.append(self._mirror[start : start + source.nbytes].view(source.dtype).view(source.shape))
            start += -(-source.nbytes // _ALIGNMENT) * _ALIGNMENT
        dist.barrier()
        seconds = seconds_of(lambda: [target.copy_(source) for target, source in zip(targets, sources, strict=True)])
        dist.barrier()
        return seconds


def main() -> None:
    job = Job.join()
    comparison = Comparison(job)
    full = comparison.full_state_dict()
    comparison.check()
    comparison.measure()
    result = {
        "nbytes": comparison.nbytes,
        "full_state_dict": full,
        "samples": [asdict(sample) for sample in comparison.samples],
    }
    job.finish(result)


def _require_restored(name: str, subject: Subject, load: Callable[[], Any]) -> None:
    """Change everything, ``load``, and compare with what was there."""
    expected = [tensor.clone() for tensor in subject.tensors()]
    for tensor in subject.tensors():
        tensor.mul_(-2)  # the padding of a shard is 0 and stays so: it is not saved
    load()
    loaded = subject.tensors()
    equal = [torch.equal(tensor, other) for tensor, other in zip(loaded, expected, strict=True)]
    if not all(equal):
        raise RuntimeError(f"{name}: {equal.count(False)} of {len(equal)} tensors are not what was saved")


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


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    main()
