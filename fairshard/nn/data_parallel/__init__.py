"""The engine, and the doors to it."""

from fairshard.nn.data_parallel.forward_methods import register_forward_method, register_fsdp_forward_method
from fairshard.nn.data_parallel.fsdp_module import FSDPModule, UnshardHandle, share_comm_ctx
from fairshard.nn.data_parallel.fully_shard import fully_shard
from fairshard.nn.data_parallel.fully_sharded_data_parallel import FullyShardedDataParallel
from fairshard.nn.data_parallel.observer import Observation, observe
from fairshard.nn.data_parallel.optim_state_keys import OptimStateKeyType
from fairshard.nn.data_parallel.options import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fairshard.nn.data_parallel.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
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
from fairshard.nn.data_parallel.tree import clean_tensor_name
from fairshard.nn.data_parallel.unit_attributes import get_fsdp_instances
from fairshard.utils.unit_event import Phase, UnitEvent

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "Observation",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "Phase",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "TrainingState",
    "UnitEvent",
    "UnshardHandle",
    "clean_tensor_name",
    "fully_shard",
    "get_fsdp_instances",
    "observe",
    "register_forward_method",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
