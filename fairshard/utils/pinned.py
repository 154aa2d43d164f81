"""Pinned host memory of exact size, which an accelerator can copy from and to asynchronously.

torch's pinned allocator rounds up to powers of two, up to twice the request. Where the driver can register ordinary
memory, mapped memory of exact size is registered; elsewhere torch's allocator is used. Either way the storage of a
tensor starts with it, because `Tensor.is_pinned` checks the start of the storage.
"""

import contextlib
import functools
import mmap
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor

from fairshard.utils.streams import is_asynchronous

_HOST = torch.device("cpu")  # named, because users set other default devices


def host_empty_like(like: Tensor, compute_device: torch.device) -> Tensor:
    """Uninitialised memory on the CPU for the elements of ``like``; pinned if ``compute_device`` is an accelerator.

    If the limit of locked memory is reached, the memory is pageable, with one warning.
    """
    is_pinned = is_asynchronous(compute_device)
    if is_pinned and can_register(compute_device):
        return _pinned_empty(like.numel(), like.dtype, compute_device).view(like.shape)
    return torch.empty(like.shape, dtype=like.dtype, device=_HOST, pin_memory=is_pinned)


def can_register(device: torch.device) -> bool:
    """Whether the driver of ``device`` can pin ordinary host memory in place."""
    return hasattr(torch.get_device_module(device.type), "cudart")


def host_register(data: Tensor, device: torch.device) -> bool:
    """Pin the memory of ``data``, which starts at a page, in place; False if the limit of locked memory is reached.

    `host_unregister` must be called before that memory is freed.
    """
    if int(_driver(device).cudaHostRegister(data.data_ptr(), data.nbytes, 0)) == 0:
        return True
    with contextlib.suppress(RuntimeError):
        torch.zeros((), device=device)  # clears the error that the driver keeps for the next launch
    return False


def host_unregister(address: int, device: torch.device) -> None:
    """Undo `host_register` for memory that starts at ``address``."""
    _driver(device).cudaHostUnregister(address)


def _driver(device: torch.device) -> Any:
    return torch.get_device_module(device.type).cudart()


def _pinned_empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    nbytes = numel * dtype.itemsize
    if not nbytes:
        return torch.empty(0, dtype=dtype, device=_HOST)
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    data = torch.frombuffer(memory, dtype=dtype)
    if host_register(data, device):
        weakref.finalize(memory, host_unregister, data.data_ptr(), device)  # before the memory is unmapped
    else:
        _warn_not_pinned()
    return data


@functools.cache
def _warn_not_pinned() -> None:
    """Warn, the first time."""
    warnings.warn(
        "Host memory could not be pinned: the limit of locked memory is reached (`ulimit -l`). Copies to and from the "
        "device are slower, and no longer overlap with its work.",
        stacklevel=2,
    )
