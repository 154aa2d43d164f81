"""One rank of a measurement: ``python rank.py JOB``, with a `runner.Job` and this rank's part of it as JSON."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import measure
import torch

FAKE_WORLD = 8
"""Ranks of torch's fake process group, of which this process is one."""


class Rank:
    """This process among the ranks of a job: its group, its device, and its turns."""

    def __init__(self, job: Mapping[str, Any], resident_at_start: int):
        self.rank: int = job["rank"]
        self.world: int = job["world"]
        kind = job["device"]
        if kind == "sim":  # registered by the tests' simulator, not by torch
            from tests import sim

            sim.load()
        self.is_accelerated = kind != "cpu"
        self._resident_at_start = resident_at_start
        self._module: Any = torch.get_device_module(kind)
        self.device = torch.device("cpu")
        if self.is_accelerated:
            self.device = torch.device(kind, self.rank % self._module.device_count())
            self._module.set_device(self.device)
        # Open for both, so that neither reading nor writing waits for the other side to open them.
        self._turn = [os.open(path, os.O_RDWR) for path in job["turn"]]

    def join(self, store: str, is_fake: bool) -> None:
        """Join the ranks that meet at the file ``store``, or a fake group. Tensors in host memory use gloo."""
        import torch.distributed as dist

        if is_fake:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=FAKE_WORLD)
            return
        backend = "gloo"
        if self.is_accelerated:
            kind = self.device.type
            backend = f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
        os.environ.update(LOCAL_RANK=str(self.rank), LOCAL_WORLD_SIZE=str(self.world))
        dist.init_process_group(backend, init_method=f"file://{store}", rank=self.rank, world_size=self.world)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Inside, no other job computes: rank 0 waits for a byte, and passes it on when all ranks have left."""
        import torch.distributed as dist

        if self._turn and self.rank == 0:
            os.read(self._turn[0], 1)
        dist.barrier()
        yield
        if self._turn:
            dist.barrier()
            if self.rank == 0:
                os.write(self._turn[1], b".")

    def synchronize(self) -> None:
        """Wait until all work queued so far is done."""
        if self.is_accelerated:
            self._module.synchronize()

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        measure.reset_peak_resident()
        if self.is_accelerated:
            self._module.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """The most bytes since `reset_peak`: an accelerator's tensors; on the CPU the process, beyond its start."""
        if self.is_accelerated:
            return int(self._module.max_memory_allocated())
        return measure.peak_resident_bytes() - self._resident_at_start


def main() -> None:
    # Memory is counted from here, so nothing but torch may be imported at the top of this file.
    resident_at_start = measure.resident_bytes()
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    rank = Rank(job, resident_at_start)
    rank.join(job["store"], job["is_fake"])
    module, _, function = job["worker"].partition(":")
    result = getattr(importlib.import_module(module), function)(rank, **job["settings"])
    Path(job["result"]).write_text(json.dumps(result))
    torch.distributed.barrier()
    os._exit(0)  # gloo groups sometimes hang while Python drops its last references


if __name__ == "__main__":
    main()
