"""Arithmetic over collections of tensors, and descriptions of them."""

from collections.abc import Iterable

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


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether both are the same elements of the same memory, in one dtype."""
    is_alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return is_alike and (not one.numel() or one.data_ptr() == other.data_ptr())


@torch.no_grad()
def round_stochastically_(source: Tensor, target: Tensor, generator: torch.Generator) -> Tensor:
    """Round fp32 ``source`` to bf16 ``target`` stochastically, with mean error 0; returns ``target``.

    bf16 is the upper half of fp32: add 16 random bits to the lower half, then truncate it.
    """
    noise = torch.randint(0, 1 << 16, source.shape, dtype=torch.int32, generator=generator, device=source.device)
    noise.add_(source.view(torch.int32)).bitwise_and_(-1 << 16)
    return target.copy_(noise.view(torch.float32))


def form_of(tensor: Tensor) -> str:
    """Everything about ``tensor``, and about the tensors that it wraps, except the values."""
    own = f"{type(tensor).__name__} {tuple(tensor.shape)} {tensor.stride()} {tensor.dtype} {tensor.device}"
    if not is_traceable_wrapper_subclass(tensor):
        return own
    names, context = tensor.__tensor_flatten__()
    return f"{own} {context} {[form_of(getattr(tensor, name)) for name in names]}"
