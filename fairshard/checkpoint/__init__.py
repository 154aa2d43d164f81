"""Crash-safe checkpoints of sharded models, on top of ``torch.distributed.checkpoint``."""

from fairshard.checkpoint.checkpointer import Checkpointer
from fairshard.checkpoint.loading import load, load_optimizer
from fairshard.checkpoint.saving import save

__all__ = ["Checkpointer", "load", "load_optimizer", "save"]
