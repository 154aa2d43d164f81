"""The two entry points of the engine: `FullyShardedDataParallel` and `fully_shard`."""

from fairshard.engine.training_state import TrainingState
from fairshard.nn.data_parallel.forward_methods import register_forward_method, register_fsdp_forward_method
from fairshard.nn.data_parallel.fully_shard import fully_shard
from fairshard.nn.data_parallel.fully_sharded_data_parallel import FullyShardedDataParallel
from fairshard.nn.data_parallel.in_place.module import FSDPModule, UnshardHandle, share_comm_ctx
from fairshard.nn.data_parallel.wrapper.attributes import get_fsdp_instances
from fairshard.observe.observer import Observation, observe
from fairshard.observe.unit_event import Phase, UnitEvent
from fairshard.settings.data_mesh import DataParallelMeshDims, ShardPlacementResult
from fairshard.settings.fsdp1 import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fairshard.settings.fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fairshard.settings.placements import Owned, RowBlocks
from fairshard.settings.state_dicts import (
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
from fairshard.state.optim_keys import OptimStateKeyType
from fairshard.utils.names import clean_tensor_name

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
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
    "Owned",
    "Phase",
    "RowBlocks",
    "ShardPlacementResult",
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
