"""The two entry points of the engine: `FullyShardedDataParallel` and `fully_shard`."""

from typing import TYPE_CHECKING

from fairshard.utils.lazy import lazy

if TYPE_CHECKING:
    from fairshard.engine.training_state import TrainingState
    from fairshard.extras.observe.observer import Observation, observe
    from fairshard.extras.observe.unit_event import Phase, UnitEvent
    from fairshard.nn.data_parallel.fully_sharded_data_parallel import FullyShardedDataParallel
    from fairshard.nn.data_parallel.in_place.fully_shard import fully_shard
    from fairshard.nn.data_parallel.in_place.module import FSDPModule, UnshardHandle, share_comm_ctx
    from fairshard.nn.data_parallel.methods import register_forward_method, register_fsdp_forward_method
    from fairshard.nn.data_parallel.wrapper.attributes import get_fsdp_instances
    from fairshard.settings.fsdp import (
        BackwardPrefetch,
        CPUOffload,
        CPUOffloadPolicy,
        MixedPrecision,
        MixedPrecisionPolicy,
        OffloadPolicy,
        ShardingStrategy,
    )
    from fairshard.settings.mesh import DataParallelMeshDims, ShardPlacementResult
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
    from fairshard.state.optim_params import OptimStateKeyType
    from fairshard.utils.names import clean_tensor_name

_HOMES = {
    "BackwardPrefetch": "fairshard.settings.fsdp",
    "CPUOffload": "fairshard.settings.fsdp",
    "CPUOffloadPolicy": "fairshard.settings.fsdp",
    "DataParallelMeshDims": "fairshard.settings.mesh",
    "FSDPModule": "fairshard.nn.data_parallel.in_place.module",
    "FullOptimStateDictConfig": "fairshard.settings.state_dicts",
    "FullStateDictConfig": "fairshard.settings.state_dicts",
    "FullyShardedDataParallel": "fairshard.nn.data_parallel.fully_sharded_data_parallel",
    "LocalOptimStateDictConfig": "fairshard.settings.state_dicts",
    "LocalStateDictConfig": "fairshard.settings.state_dicts",
    "MixedPrecision": "fairshard.settings.fsdp",
    "MixedPrecisionPolicy": "fairshard.settings.fsdp",
    "Observation": "fairshard.extras.observe.observer",
    "OffloadPolicy": "fairshard.settings.fsdp",
    "OptimStateDictConfig": "fairshard.settings.state_dicts",
    "OptimStateKeyType": "fairshard.state.optim_params",
    "Owned": "fairshard.settings.placements",
    "Phase": "fairshard.extras.observe.unit_event",
    "RowBlocks": "fairshard.settings.placements",
    "ShardPlacementResult": "fairshard.settings.mesh",
    "ShardedOptimStateDictConfig": "fairshard.settings.state_dicts",
    "ShardedStateDictConfig": "fairshard.settings.state_dicts",
    "ShardingStrategy": "fairshard.settings.fsdp",
    "StateDictConfig": "fairshard.settings.state_dicts",
    "StateDictSettings": "fairshard.settings.state_dicts",
    "StateDictType": "fairshard.settings.state_dicts",
    "TrainingState": "fairshard.engine.training_state",
    "UnitEvent": "fairshard.extras.observe.unit_event",
    "UnshardHandle": "fairshard.nn.data_parallel.in_place.module",
    "clean_tensor_name": "fairshard.utils.names",
    "fully_shard": "fairshard.nn.data_parallel.in_place.fully_shard",
    "get_fsdp_instances": "fairshard.nn.data_parallel.wrapper.attributes",
    "observe": "fairshard.extras.observe.observer",
    "register_forward_method": "fairshard.nn.data_parallel.methods",
    "register_fsdp_forward_method": "fairshard.nn.data_parallel.methods",
    "share_comm_ctx": "fairshard.nn.data_parallel.in_place.module",
}
if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, _HOMES)

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
