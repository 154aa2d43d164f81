"""Modules and wrappers."""

from fairshard.checks.histories import compare_ranks
from fairshard.nn import comm_hooks
from fairshard.nn.checkpoint import checkpoint_wrapper, disable_checkpointing
from fairshard.nn.data_parallel import *  # noqa: F403
from fairshard.nn.data_parallel import FullyShardedDataParallel
from fairshard.nn.data_parallel import __all__ as _exported
from fairshard.nn.flatten_params_wrapper import FlattenParamsWrapper
from fairshard.params.buffers import cast_buffers_
from fairshard.utils.custom_comms import AllGather, ReduceScatter

FSDP = FullyShardedDataParallel

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
