"""Modules and wrappers."""

from fairshard.nn.data_parallel import FullyShardedDataParallel, TrainingState
from fairshard.nn.data_parallel.buffers import cast_buffers_

FSDP = FullyShardedDataParallel

__all__ = ["FSDP", "FullyShardedDataParallel", "TrainingState", "cast_buffers_"]
