"""What the ranks of a measurement have in common: they read their job, join each other, and hand over a result."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class RankJob:
    """What `launch` hands to a rank; a script adds fields of its own."""

    model: str
    world: int
    threads: int
    rank: int
    store: str
    result: str

    @classmethod
    def join(cls) -> Any:
        """The job on the command line, once this process is a rank of its gloo group. **Collective.**"""
        job = cls(**json.loads(sys.argv[1]))
        torch.set_num_threads(job.threads)
        store = dist.FileStore(job.store, job.world)
        dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world)
        return job

    def finish(self, result: Any) -> None:
        """Hand ``result`` over, and end the process. **Collective.** Does not return."""
        Path(self.result).write_text(json.dumps(result))
        dist.barrier()
        os._exit(0)  # gloo groups sometimes hang while Python drops its last references


def seconds_of(act: Callable[[], Any]) -> float:
    """Seconds that ``act()`` takes."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start
