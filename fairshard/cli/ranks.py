"""This process's place among the ranks, and the number of threads that it may use."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch.distributed as dist

from fairshard.utils.host import visible_cpus


@dataclass(frozen=True)
class Ranks:
    """A process's place: its rank among all ``size``, its local rank among the ``local_size`` of this host."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def from_environment(cls) -> Ranks | None:
        """The place that torchrun or the launcher assigned to this process; None without either."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        values = [os.environ.get(name, "") for name in names]
        return cls(*map(int, values)) if all(value.isdecimal() for value in values) else None

    @classmethod
    def here(cls) -> Ranks:
        """The place of this process: of the environment, of the default process group, or alone."""
        alone = cls(dist.get_rank(), dist.get_world_size(), 0, 1) if dist.is_initialized() else cls(0, 1, 0, 1)
        return cls.from_environment() or alone


def default_threads(local_size: int) -> int:
    """Threads for each of ``local_size`` ranks that share this host's CPUs."""
    return max(1, visible_cpus() // local_size)
