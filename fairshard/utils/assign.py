"""Assignments to ``.data`` and ``.grad`` that torch does not allow directly."""

import torch
from torch import Tensor


def set_data(tensor: Tensor, data: Tensor) -> None:
    """Like ``tensor.data = data``, but ``data`` may be on any type of device; ``tensor`` stays the same object.

    torch assigns across types of devices that are part of torch only. On others the two tensors' contents are swapped;
    ``tensor`` then loses its gradient and its hooks.
    """
    if torch._has_compatible_shallow_copy_type(tensor, data):
        tensor.data = data
    else:
        torch._C._swap_tensor_impl(tensor, data.detach().requires_grad_(tensor.requires_grad))


def set_grad(param: Tensor, grad: Tensor | None) -> None:
    """Make ``grad``, of any dtype, the gradient of ``param``; ``param.grad`` then shares its memory."""
    if grad is None:
        param.grad = None
    elif hasattr(param, "grad_dtype"):
        if param.grad_dtype != grad.dtype:
            param.grad = None
            param.grad_dtype = grad.dtype
        param.grad = grad
    elif param.dtype == grad.dtype:
        param.grad = grad
    else:  # torch < 2.13 has no `grad_dtype`, and compares dtypes only in this assignment; delete with its support
        param.grad = torch.empty_like(param, requires_grad=False)
        param.grad.data = grad
