"""The device that the ranks of a benchmark compute on: the CPU, or any type of accelerator that torch knows."""

from __future__ import annotations

import os
from typing import Any

import measure
import torch
import torch.distributed as dist


class Accelerator:
    """Device number ``rank`` of type ``kind``; ``"cpu"`` is the host itself, where nothing is asynchronous."""

    def __init__(self, kind: str, rank: int):
        if kind == "sim":  # registered by the tests' simulator, not by torch
            from tests import sim

            sim.load()
        self.kind = kind
        self.is_real = kind != "cpu"
        self._module: Any = torch.get_device_module(kind)
        self.device = torch.device("cpu")
        if self.is_real:
            self.device = torch.device(kind, rank % self._module.device_count())
            self._module.set_device(self.device)

    def join(self, store: str, rank: int, world: int) -> None:
        """Join the ranks that meet at the file ``store``; tensors in host memory use gloo."""
        backend = "gloo"
        if self.is_real:
            backend = f"cpu:gloo,{self.kind}:{dist.get_default_backend_for_device(self.kind)}"
        os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)

    def synchronize(self) -> None:
        """Wait until all work queued so far is done."""
        if self.is_real:
            self._module.synchronize()

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        measure.reset_peak_resident()
        if self.is_real:
            self._module.reset_peak_memory_stats()

    def peak_bytes(self, resident_at_start: int) -> int:
        """The most bytes since `reset_peak`: an accelerator's tensors; on the CPU the process, beyond its start."""
        if self.is_real:
            return int(self._module.max_memory_allocated())
        return measure.peak_resident_bytes() - resident_at_start
