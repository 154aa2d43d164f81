"""Gradient communication hooks for `FullyShardedDataParallel.register_comm_hook`.

A hook reduces and averages the gradient of one flat parameter:

- ``hook(state, grad, shard)`` for sharded parameters: ``grad`` is this rank's whole flat gradient
  ``[world_size * S]``; the hook fills ``shard`` ``[S]`` with this rank's piece of the mean;
- ``hook(state, grad)`` under ``NO_SHARD``: the hook replaces ``grad`` with the mean, in place.

PyTorch's hooks (``torch.distributed.algorithms._comm_hooks``) have the same form and can be passed unchanged.

Source: PyTorch's FSDP, for the names.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fairshard.utils.collectives import Communicator, exchange_tag
from fairshard.utils.groups import communicator, default_group

__all__ = [
    "DefaultState",
    "LowPrecisionState",
    "allreduce_hook",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "reduce_scatter_hook",
]


class DefaultState:
    """State of the hooks below: the group, and the divisors before and after the sum.

    The first divisor is a power of 2 near the square root of the number of ranks, which keeps both the gradients and
    their sum in the range of fp16.
    """

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        self.process_group = default_group() if process_group is None else process_group
        self.world_size = self.process_group.size()
        powers = (2.0**exponent for exponent in itertools.count())
        self.gradient_predivide_factor = next(f for f in powers if self.world_size % f or f * f >= self.world_size)
        self.gradient_postdivide_factor = self.world_size / self.gradient_predivide_factor
        self._id: int | None = None
        self._uses = 0

    def _comm(self) -> Communicator:
        comm = communicator(self.process_group)
        if self._id is None:
            self._id = comm.new_id()
        return comm

    def _tag(self) -> int:
        self._uses += 1
        assert self._id is not None
        return exchange_tag("reduce_scatter", self._id, self._uses)


class LowPrecisionState(DefaultState):
    """State of hooks that send gradients in a lower precision than ``parameter_type``, the shards' dtype."""

    def __init__(self, process_group: ProcessGroup | None = None, parameter_type: torch.dtype = torch.float32) -> None:
        super().__init__(process_group)
        self.parameter_type = parameter_type


def allreduce_hook(state: DefaultState, grad: Tensor) -> None:
    """Replace ``grad`` with its mean over ranks. **Collective.**"""
    comm = state._comm()
    grad.div_(state.gradient_predivide_factor)
    total = comm.sum_over_ranks(grad, state._tag()).wait()
    assert total is not None
    grad.copy_(total.div_(state.gradient_postdivide_factor))


def reduce_scatter_hook(state: DefaultState, grad: Tensor, output: Tensor) -> None:
    """Fill ``output`` with this rank's piece of the mean of ``grad``. **Collective.**"""
    comm = state._comm()
    grad.div_(state.gradient_predivide_factor)
    total = comm.reduce_scatter(grad.view(comm.world_size, -1), state._tag()).wait()
    assert total is not None
    output.copy_(total.div_(state.gradient_postdivide_factor))


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
        reduce_scatter_hook(state, narrow, output)


LOW_PRECISION_HOOKS = [fp16_compress_hook, bf16_compress_hook]
