"""What a unit does with its parameters and gradients: all that the engine knows of a user's options."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import torch


class GradHome(Enum):
    """Where the reduced gradient of a shard is kept."""

    SHARD = "on the shard, in the memory of the reduction"
    HOST = "on the shard, in host memory"
    HELD = "with the unit, on the compute device: torch refuses a ``.grad`` on another device than its parameter"


class BackwardPrefetch(Enum):
    """When the backward starts to gather the next unit: before or after it computes the current unit's gradients."""

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


@dataclass(frozen=True)
class Rule:
    """The rule of one unit, in plain values; ``fairshard.settings.config`` makes it from the user's options.

    Attributes:
        reshard_after_forward: False: parameters stay gathered for the backward; a number: parts of them do.
        reshard_root: the outermost unit, too, is freed after its forward.
        keeps_across_passes: the next forward reuses parameters that a forward left gathered (see `Options`).
        keeps_in_no_sync: a backward under ``no_sync`` leaves parameters gathered.
        compute_dtype: the dtype in which parameters are gathered; None: their own.
        reduce_dtype: the dtype in which gradients are reduced; None: that of compute.
        keeps_reduce_dtype: gradients of shards stay in the dtype of the reduction.
        buffer_dtype: the dtype of floating buffers while modules compute; None: their own.
        input_dtype, root_input_dtype: to which a forward's inputs are cast, the latter for the outermost unit.
        divide_before: the divisor of gradients before their sum.
        cpu_offload: the device keeps no copy of a shard in host memory.
        prefetches_in_forward: a forward gathers the next unit ahead.
        backward_prefetch: when a backward gathers the next unit ahead; None: never.
    """

    reshard_after_forward: bool | int = True
    reshard_root: bool = False
    keeps_across_passes: bool = False
    keeps_in_no_sync: bool = False
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    keeps_reduce_dtype: bool = False
    buffer_dtype: torch.dtype | None = None
    input_dtype: torch.dtype | None = None
    root_input_dtype: torch.dtype | None = None
    divide_before: float = 1.0
    cpu_offload: bool = False
    grad_home: GradHome = GradHome.SHARD
    prefetches_in_forward: bool = True
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE

    def compute_dtype_of(self, param_dtype: torch.dtype, keeps_dtype: bool = False) -> torch.dtype:
        """The dtype in which parameters of ``param_dtype`` are gathered and compute; with ``keeps_dtype`` their own."""
        return param_dtype if keeps_dtype else self.compute_dtype or param_dtype

    def reduce_dtype_of(self, compute_dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients are reduced, for parameters that compute in ``compute_dtype``."""
        return self.reduce_dtype or compute_dtype
