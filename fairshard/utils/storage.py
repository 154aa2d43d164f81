"""The memory behind a tensor: allocated and freed in place, which keeps every view of it valid; or exchanged."""

import torch
from torch import Tensor

__all__ = ["alloc_storage_", "free_storage_"]


def free_storage_(data: Tensor) -> None:
    """Free the memory of ``data``; its shape, strides and views stay, and must not be read until refilled."""
    storage = data.untyped_storage()
    if storage.size() and data.storage_offset():
        raise ValueError(
            "`data` must start at the beginning of its storage, but starts at element "
            f"{data.storage_offset()}: freeing it would take memory from a tensor that shares it."
        )
    storage.resize_(0)


def alloc_storage_(data: Tensor, size: torch.Size | int | None = None) -> None:
    """Allocate memory of ``data`` for ``size`` elements (default: its own), uninitialised; no-op if already done."""
    if size is None:
        size = data.size()
    numel = size if isinstance(size, int) else size.numel()
    storage = data.untyped_storage()
    nbytes = numel * data.element_size()
    if storage.size() == nbytes:
        return
    if storage.size():
        raise ValueError(
            f"`data` must have been freed before it gets memory of another size, but holds {storage.size()} bytes "
            f"and {nbytes} were requested. Call free_storage_(data) first."
        )
    storage.resize_(nbytes)


def is_aliased(data: Tensor) -> bool:
    """Whether any other tensor (a view, a detached alias) uses the memory of ``data``."""
    storage = data.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > 2  # `data` and `storage`


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
