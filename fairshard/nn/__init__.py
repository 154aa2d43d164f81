"""Modules and wrappers."""

from typing import TYPE_CHECKING

from fairshard.nn.data_parallel import __all__ as _exported
from fairshard.utils.lazy import lazy

if TYPE_CHECKING:
    from fairshard.checks.histories import compare_ranks
    from fairshard.nn import comm_hooks
    from fairshard.nn.buffers import cast_buffers_
    from fairshard.nn.checkpoint import checkpoint_wrapper, disable_checkpointing
    from fairshard.nn.data_parallel import *  # noqa: F403
    from fairshard.nn.data_parallel import FullyShardedDataParallel as FSDP
    from fairshard.nn.flatten_params_wrapper import FlattenParamsWrapper
    from fairshard.utils.custom_comms import AllGather, ReduceScatter

_HOMES = {
    **dict.fromkeys(_exported, "fairshard.nn.data_parallel"),
    "AllGather": "fairshard.utils.custom_comms",
    "FSDP": "fairshard.nn.data_parallel:FullyShardedDataParallel",
    "FlattenParamsWrapper": "fairshard.nn.flatten_params_wrapper",
    "ReduceScatter": "fairshard.utils.custom_comms",
    "cast_buffers_": "fairshard.nn.buffers",
    "checkpoint_wrapper": "fairshard.nn.checkpoint",
    "comm_hooks": "fairshard.nn.comm_hooks",
    "compare_ranks": "fairshard.checks.histories",
    "disable_checkpointing": "fairshard.nn.checkpoint",
}
if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, _HOMES)

__all__ = [
    "FSDP",
    "AllGather",
    "FlattenParamsWrapper",
    "ReduceScatter",
    "cast_buffers_",
    "checkpoint_wrapper",
    "comm_hooks",
    "compare_ranks",
    "disable_checkpointing",
    *_exported,
]
