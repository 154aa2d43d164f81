"""One rank of the measurement of copies in memory: ``python recovery_worker.py JOB``, with `Job` as JSON."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from engines.engine import Engine, wrap_children
from models import MODELS, build_gpt, random_batches
from rank_job import RankJob, seconds_of

from fairshard.checkpoint import Checkpointer
from fairshard.nn import FullyShardedDataParallel as FSDP

_POLL_S = 0.005


@dataclass(frozen=True)
class Job(RankJob):
    """What `launch` hands to a rank. Ranks are spread evenly over ``hosts``, each with a folder of its own."""

    repeat: int
    every: int
    hosts: int
    disk: str
    memory: str


class Measurement:
    """A trained model whose state is copied, saved and loaded."""

    def __init__(self, job: Job) -> None:
        self.job = job
        gpt = build_gpt(MODELS[job.model])
        wrap_children(gpt.blocks, lambda block: FSDP(block))
        self.engine = Engine(FSDP(gpt))
        self.batches = random_batches(MODELS[job.model], job.rank)
        self.memory = Path(job.memory, f"host-{job.rank * job.hosts // job.world}")
        self.memory.mkdir(parents=True, exist_ok=True)
        self.kept = self.checkpointer()
        for _ in range(3):
            self.step()

    def checkpointer(self) -> Checkpointer:
        return Checkpointer(self.job.disk, memory_every=self.job.every, memory_folder=self.memory)

    @property
    def state(self) -> tuple[Any, Any]:
        return self.engine.model, self.engine.optimizer

    def step(self) -> None:
        self.engine.backward(self.engine.forward(*next(self.batches)))
        self.engine.step()

    def steps(self, number: int, copies: bool) -> float:
        """Seconds of a step, averaged over ``number`` steps with or without copies every ``every`` steps."""
        dist.barrier()
        start = time.perf_counter()
        for step in range(number):
            self.step()
            if copies and step % self.job.every == 0:
                self.kept.copy_to_memory(step, *self.state)
        self.kept.wait()
        return (time.perf_counter() - start) / number

    def copy(self, step: int) -> dict[str, float]:
        """Stall and duration of a copy while training waits, and the bytes in memory after it and at most."""
        dist.barrier()
        peak = [0]
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(_POLL_S):
                peak[0] = max(peak[0], _nbytes(self.memory))

        watcher = threading.Thread(target=watch)
        watcher.start()
        stall = seconds_of(lambda: self.kept.copy_to_memory(step, *self.state))
        rest = seconds_of(self.kept.wait)
        ended.set()
        dist.barrier()
        watcher.join()
        return {"stall": stall, "rest": rest, "nbytes": _nbytes(self.memory), "peak_nbytes": peak[0]}

    def load(self, kind: str) -> float:
        """Seconds of a load from ``memory``, from ``disk``, or from ``cached`` files of the disk."""
        gc.collect()
        if kind == "disk":
            for file in Path(self.job.disk).rglob("*.distcp"):
                with file.open("rb") as stream:
                    os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        fresh = self.checkpointer() if kind == "memory" else Checkpointer(self.job.disk)
        dist.barrier()
        found: list[int | None] = []
        seconds = seconds_of(lambda: found.append(fresh.load_latest(*self.state)))
        assert found == [1000 if kind == "memory" else 500]
        return seconds


def main() -> None:
    job = Job.join()
    own = Measurement(job)
    result: dict[str, Any] = {"copies": [], "save_stall": [], "steps": [], "loads": []}
    own.copy(0)
    for number in range(job.repeat):
        result["copies"].append(own.copy(number + 1))
        plain = own.steps(4 * job.every, copies=False)
        result["steps"].append({"plain": plain, "copied": own.steps(4 * job.every, copies=True)})
    for _ in range(job.repeat):
        dist.barrier()
        result["save_stall"].append(seconds_of(lambda: own.kept.save(500, *own.state)))
        own.kept.wait()
    own.copy(1000)
    for number in range(job.repeat):
        kinds = ("memory", "disk", "cached")
        result["loads"].append({kind: own.load(kind) for kind in (*kinds[number % 3 :], *kinds[: number % 3])})
    if job.hosts > 1:  # the last host is lost: its ranks get their files from another
        result["lost"] = []
        for _ in range(job.repeat):
            dist.barrier()
            if job.rank == 0:
                shutil.rmtree(Path(job.memory, f"host-{job.hosts - 1}"))
            dist.barrier()
            own.memory.mkdir(exist_ok=True)
            result["lost"].append(own.load("memory"))
    job.finish(result)


def _nbytes(folder: Path) -> int:
    """Bytes of memory of all files in ``folder``."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(f"{base}/{name}").st_blocks * 512
            except FileNotFoundError:
                continue
    return total


if __name__ == "__main__":
    main()
