"""Crash-safe checkpoints of sharded models, on top of ``torch.distributed.checkpoint``."""

from fairshard.checkpoint.checkpointer import Checkpointer
from fairshard.checkpoint.loading import load, load_optimizer
from fairshard.checkpoint.preemption import Preempted, Preemption, leave_signals_to_rank, on_preemption
from fairshard.checkpoint.saving import save

__all__ = [
    "Checkpointer",
    "Preempted",
    "Preemption",
    "leave_signals_to_rank",
    "load",
    "load_optimizer",
    "on_preemption",
    "save",
]
