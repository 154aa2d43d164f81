"""The engine, and the doors to it."""

from fairshard.nn.data_parallel.forward_methods import register_forward_method
from fairshard.nn.data_parallel.fully_sharded_data_parallel import FullyShardedDataParallel
from fairshard.nn.data_parallel.optim_state_keys import OptimStateKeyType
from fairshard.nn.data_parallel.options import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fairshard.nn.data_parallel.state_dict_config import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fairshard.nn.data_parallel.training_state import TrainingState

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "TrainingState",
    "register_forward_method",
]
