"""Tensors that a collective of tensor parallelism is still writing: torch's ``AsyncCollectiveTensor``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from fairshard.utils.nested import apply_to_tensors


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: AsyncCollectiveTensor) -> Tensor:
        return tensor.wait().detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _wait(tensor: Tensor) -> Tensor:
    return _Waited.apply(tensor) if type(tensor) is AsyncCollectiveTensor else tensor  # type: ignore[no-untyped-call]


def waited(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of a module with plain tensors, in the same memory, in place of those still being written.

    Waits for these, on the current stream. Compiled code (torch 2.13) loses the gradients of such inputs: it takes the
    tensor inside, whose graph node is that of the collective and not that of the input.
    """
    if AsyncCollectiveTensor in map(type, (*args, *kwargs.values())):
        return apply_to_tensors(_wait, args), apply_to_tensors(_wait, kwargs)
    return args, kwargs
