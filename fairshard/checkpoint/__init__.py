"""Crash-safe checkpoints of sharded models, on top of ``torch.distributed.checkpoint``."""

from fairshard.checkpoint.checkpointer import Checkpointer
from fairshard.checkpoint.loading import load
from fairshard.checkpoint.saving import save

__all__ = ["Checkpointer", "load", "save"]
