"""What PyTorch's kernels do not see to when they step DTensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class DTensorsOf:
    """Those of our DTensors that an optimizer holds, which lie in ``shards``."""

    def __init__(self, optimizer: Optimizer, shards: Sequence[Tensor]) -> None:
        self._shards = shards
        params = [param for group in optimizer.param_groups for param in group["params"]]
        strided = [param for param in params if isinstance(param, DTensor) and not param._local_tensor.is_contiguous()]
        self._strided = strided if shards else []

    def before_step(self, optimizer: Optimizer) -> None:
        """Count the writes to come, which foreach and fused kernels do not, and let memory orders agree."""
        for shard in self._shards:
            increment_version(shard)
        for param in self._strided:
            _align(param, [param.grad, *optimizer.state.get(param, {}).values()])


def _align(param: DTensor, beside: Sequence[object]) -> None:
    """Let DTensors ``beside`` one that is cut on another dimension than the first lie in memory in its order.

    Fused kernels read all tensors in the order of memory: a gradient that the user has put there, or loaded state,
    would be read in another order than the parameter's, to wrong numbers without an error (torch 2.13).
    """
    own = param._local_tensor.detach()
    for value in beside:
        if isinstance(value, DTensor) and value.shape == param.shape:
            local = value._local_tensor
            if local.shape == own.shape and local.stride() != own.stride():
                value._local_tensor = torch.empty_like(own, dtype=local.dtype, device=local.device).copy_(local)
