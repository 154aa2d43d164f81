"""Tensor subclasses that wrap other tensors, and the extension points with which some of them are sharded.

A wrapper has no memory of its own: its values are in inner tensors, which only its own functions read and write.

Source: PyTorch's FSDP2, for the names of the extension points and their arguments.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"

_NUM_ARGUMENTS = 1, 5  # (mesh), or (mesh, outer_size, outer_stride, module, mp_policy)


def is_wrapper(tensor: Tensor) -> bool:
    """Whether ``tensor`` wraps other tensors and has no memory of its own."""
    if type(tensor) in (Tensor, nn.Parameter) or isinstance(tensor, FakeTensor):
        return False
    if is_traceable_wrapper_subclass(tensor):
        return True
    has_elements = tensor.numel() > 0 and not tensor.is_meta and tensor.layout is torch.strided
    return has_elements and not tensor.data_ptr()


def check_dtensor_subclasses(fqn: str) -> None:
    """Raise if this torch does not dispatch to subclasses of DTensor: 2.10 and 2.11 do not.

    Raises:
        NotImplementedError: parameter ``fqn`` would be such a subclass.
    """
    if "2.10" <= torch.__version__ < "2.12":
        raise NotImplementedError(
            "`RowBlocks` and `Owned` under fully_shard need a torch that dispatches to subclasses of DTensor (2.6 to "
            f"2.9, or 2.12 and later), but this is torch {torch.__version__} (parameter `{fqn}`). Use another torch, "
            "`FullyShardedDataParallel(..., use_orig_params=True, placement_fn=...)`, or return None for it."
        )


def is_extended(tensor: Tensor) -> bool:
    """Whether the class of ``tensor`` defines what is gathered from a shard of it."""
    return hasattr(tensor, PRE) or hasattr(tensor, POST)


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """The plain tensors inside ``tensor``; none if its class does not list them."""
    if not is_wrapper(tensor):
        return [tensor]
    if not is_traceable_wrapper_subclass(tensor):
        return []
    names, _ = tensor.__tensor_flatten__()
    return [inner for name in names for inner in inner_tensors(getattr(tensor, name))]


def check_extended(param: Tensor, fqn: str) -> None:
    """Check the extension points of ``param``, which has at least one of them.

    Raises:
        TypeError: one is missing, `PRE` takes other arguments, or ``param`` is not contiguous.
    """
    cls = type(param).__name__
    for name, other in ((PRE, POST), (POST, PRE)):
        if not hasattr(param, name):
            raise TypeError(
                f"A tensor subclass must have both `{PRE}` and `{POST}` to be sharded, but {cls}, the class of "
                f"parameter `{fqn}`, has only `{other}`. Add `{name}`."
            )
    signature = inspect.signature(getattr(param, PRE))
    if len(signature.parameters) not in _NUM_ARGUMENTS:
        raise TypeError(
            f"`{PRE}` must take (mesh) or (mesh, outer_size, outer_stride, module, mp_policy), but that of {cls}, the "
            f"class of parameter `{fqn}`, takes {signature}. Change its signature."
        )
    if not param.is_contiguous():
        raise TypeError(
            f"A parameter of a tensor subclass must be contiguous to be sharded, but `{fqn}` ({cls}) has strides "
            f"{param.stride()}. Make it from a contiguous tensor."
        )


def refuse_wrapper(param: Tensor, fqn: str, cure: str) -> None:
    """Raise TypeError for ``param``, a wrapper that cannot be sharded; ``cure`` says what to do."""
    raise TypeError(
        f"A parameter must have memory of its own to be sharded, but `{fqn}` is a {type(param).__name__}, a tensor "
        f"subclass that wraps other tensors. {cure}"
    )


@torch.no_grad()
def rows_of(whole: Tensor, fqn: str, rank: int, world_size: int) -> Tensor:
    """The rows of ``whole``, a tensor subclass, that ``rank`` owns, in new memory: ``ceil(D / world_size)`` or fewer.

    Uses the functions that PyTorch's FSDP2 also needs: ``chunk``, ``new_zeros``, ``narrow`` and ``copy_``.

    Raises:
        TypeError: the class does not have one of them, or it returns another class.
    """
    cls = type(whole)
    try:
        chunks = torch.chunk(whole, world_size)
        padded = whole.new_zeros(chunks[0].size())
        num_rows = chunks[rank].size(0) if rank < len(chunks) else 0
        if num_rows and whole.numel():
            padded.narrow(0, 0, num_rows).copy_(chunks[rank])
        rows = padded.narrow(0, 0, num_rows)
    except Exception as error:
        raise TypeError(
            f"A tensor subclass must support torch.chunk, new_zeros, narrow and copy_ to be sharded, but {cls.__name__}"
            f", the class of parameter `{fqn}`, raised {type(error).__name__}: {error}. Add what is missing to its "
            "`__torch_dispatch__`."
        ) from error
    if not isinstance(rows, cls):
        raise TypeError(
            f"torch.chunk, new_zeros and narrow must return the class of their argument for a parameter to be sharded, "
            f"but for `{fqn}`, a {cls.__name__}, they return {type(rows).__name__}. Wrap their results in its "
            "`__torch_dispatch__`."
        )
    return rows
