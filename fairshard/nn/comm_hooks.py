"""Gradient communication hooks for `FullyShardedDataParallel.register_comm_hook`, over PyTorch's.

A hook reduces and averages the gradient of one flat parameter:

- ``hook(state, grad, shard)`` for sharded parameters: ``grad`` is this rank's whole flat gradient
  ``[world_size * S]``; the hook fills ``shard`` ``[S]`` with this rank's piece of the mean;
- ``hook(state, grad)`` under ``NO_SHARD``: the hook replaces ``grad`` with the mean, in place.

Compressing hooks add gradients in the dtype in which they send them, on every backend. PyTorch's own
(``torch.distributed.algorithms._comm_hooks``) can be passed too, but need an accelerator.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.algorithms._comm_hooks.default_hooks import allreduce_hook, reduce_scatter_hook

from fairshard.utils.groups import default_group

__all__ = [
    "LOW_PRECISION_HOOKS",
    "DefaultState",
    "LowPrecisionState",
    "allreduce_hook",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "reduce_scatter_hook",
]


class DefaultState(default_hooks.DefaultState):
    """State of the hooks: the group, all ranks if None, and the divisors before and after the sum."""

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        super().__init__(process_group or default_group())


class LowPrecisionState(default_hooks.LowPrecisionState):
    """State of hooks that send gradients in a lower precision than ``parameter_type``, the shards' dtype."""

    def __init__(self, process_group: ProcessGroup | None = None, parameter_type: torch.dtype = torch.float32) -> None:
        super().__init__(process_group or default_group(), parameter_type)  # type: ignore[no-untyped-call]


def fp16_compress_hook(state: LowPrecisionState, grad: Tensor, output: Tensor | None = None) -> None:
    """`reduce_scatter_hook` (or `allreduce_hook` without ``output``) with gradients sent in fp16. **Collective.**"""
    _compressed(torch.float16, state, grad, output)


def bf16_compress_hook(state: LowPrecisionState, grad: Tensor, output: Tensor | None = None) -> None:
    """Like `fp16_compress_hook`, but in bf16."""
    _compressed(torch.bfloat16, state, grad, output)


def _compressed(dtype: torch.dtype, state: LowPrecisionState, grad: Tensor, output: Tensor | None) -> None:
    narrow = grad.to(dtype)
    if output is None:
        allreduce_hook(state, narrow)
        grad.copy_(narrow)
    else:
        part = output.new_empty(output.shape, dtype=dtype)
        reduce_scatter_hook(state, narrow, part)
        output.copy_(part)


LOW_PRECISION_HOOKS = [fp16_compress_hook, bf16_compress_hook]
