"""The engine, and the doors to it."""

from fairshard.nn.data_parallel.fully_sharded_data_parallel import FullyShardedDataParallel
from fairshard.nn.data_parallel.training_state import TrainingState

__all__ = ["FullyShardedDataParallel", "TrainingState"]
