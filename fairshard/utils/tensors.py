"""Arithmetic over collections of tensors, and descriptions of them."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["calc_grad_norm"]


def calc_grad_norm(parameters: Iterable[Tensor], p: float) -> Tensor:
    """The ``p``-norm (``math.inf`` allowed) of all gradients of ``parameters`` seen as one vector.

    Computed in fp32 (fp64 for fp64 gradients); a 0-d tensor on the gradients' device. Parameters without a gradient
    are skipped; without gradients the norm is 0.
    """
    return norm_of([param.grad for param in parameters if param.grad is not None], p)


def norm_of(tensors: list[Tensor], p: float) -> Tensor:
    """The ``p``-norm of ``tensors`` seen as one vector, in fp32 or wider; 0-d, 0 without tensors."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.tensor(0.0, device="cpu")
    norms = [
        torch.linalg.vector_norm(tensor, p, dtype=torch.promote_types(tensor.dtype, torch.float32))
        for tensor in tensors
    ]
    widest = norms[0].dtype
    for norm in norms:
        widest = torch.promote_types(widest, norm.dtype)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device, widest) for norm in norms]), p)
    return total


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


@torch.no_grad()
def round_stochastically_(source: Tensor, target: Tensor, generator: torch.Generator) -> Tensor:
    """Round fp32 ``source`` to bf16 ``target`` stochastically, with mean error 0; returns ``target``.

    bf16 is the upper half of fp32: add 16 random bits to the lower half, then truncate it.
    """
    noise = torch.randint(0, 1 << 16, source.shape, dtype=torch.int32, generator=generator, device=source.device)
    noise.add_(source.view(torch.int32)).bitwise_and_(-1 << 16)
    return target.copy_(noise.view(torch.float32))


def add_runs(line: Tensor, runs: Sequence[Tensor | None], numels: Sequence[int]) -> Tensor:
    """Add each of ``runs`` to its part of ``line``, ``numels`` elements wide; None adds nothing.

    If any run is not None, the sum is in fp32 or wider, and in place if ``line`` already has that dtype.
    """
    if any(run is not None for run in runs):
        line = line.to(torch.promote_types(line.dtype, torch.float32))
        for part, run in zip(line.split(numels), runs, strict=True):
            if run is not None:
                part.add_(run)
    return line


def joined_columns(parts: Sequence[Tensor]) -> Tensor | None:
    """``parts``, 2-d views that lie side by side in the columns of one tensor, as one view; None if they do not."""
    if not parts or parts[0].dim() != 2:
        return None
    first = parts[0]
    shape, stride, start = first.shape, first.stride(), first.storage_offset()
    stop = start
    for part in parts:
        if part.dim() != 2 or part.size(0) != shape[0] or part.stride() != stride or part.storage_offset() != stop:
            return None
        stop += part.size(1)
    return first.as_strided((shape[0], stop - start), stride, start) if stride[1] == 1 else None


def form_of(tensor: Tensor) -> str:
    """Everything about ``tensor``, and about the tensors that it wraps, except the values."""
    own = f"{type(tensor).__name__} {tuple(tensor.shape)} {tensor.stride()} {tensor.dtype} {tensor.device}"
    if not is_traceable_wrapper_subclass(tensor):
        return own
    names, context = tensor.__tensor_flatten__()
    return f"{own} {context} {[form_of(getattr(tensor, name)) for name in names]}"
