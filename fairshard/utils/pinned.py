"""Pinned host memory of exact size, which an accelerator can copy from and to asynchronously.

torch's pinned allocator rounds up to powers of two, up to twice the request. Where the driver can register ordinary
memory, mapped memory of exact size is registered; elsewhere torch's allocator is used. Either way the storage of a
tensor starts with it, because `Tensor.is_pinned` checks the start of the storage.
"""

import mmap
import warnings
import weakref

import torch
from torch import Tensor

from fairshard.utils.device import can_register, host_register, host_unregister
from fairshard.utils.host import free_host_memory
from fairshard.utils.streams import is_asynchronous

MAX_FRACTION = 0.8
_HOST = torch.device("cpu")  # named, because users set other default devices
_has_warned = False


def host_empty_like(like: Tensor, compute_device: torch.device) -> Tensor:
    """Uninitialised memory on the CPU for the elements of ``like``; pinned if ``compute_device`` is an accelerator.

    If the limit of locked memory is reached, the memory is pageable, with one warning.
    """
    if not is_asynchronous(compute_device):
        return torch.empty(like.shape, dtype=like.dtype, device=_HOST)
    if not can_register(compute_device):
        return torch.empty(like.shape, dtype=like.dtype, device=_HOST, pin_memory=True)
    return _pinned_empty(like.numel(), like.dtype).view(like.shape)


def too_much_to_pin(nbytes: int, num_ranks: int) -> str:
    """Why this host's ``num_ranks`` ranks must not pin ``nbytes`` in total; empty if they may."""
    free = free_host_memory()
    if nbytes <= MAX_FRACTION * free:
        return ""
    return (
        f"Host memory to be pinned must be at most {MAX_FRACTION:.0%} of what is free, but {num_ranks} ranks here "
        f"would pin {nbytes / 2**30:.2f} GiB, with {free / 2**30:.2f} GiB free. Use more hosts, "
        "`move_grads_to_cpu=False`, or a smaller model."
    )


def _pinned_empty(numel: int, dtype: torch.dtype) -> Tensor:
    nbytes = numel * dtype.itemsize
    if not nbytes:
        return torch.empty(0, dtype=dtype, device=_HOST)
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    data = torch.frombuffer(memory, dtype=dtype)
    if host_register(data):
        weakref.finalize(memory, host_unregister, data.data_ptr())  # before the memory is unmapped
    else:
        _warn_not_pinned(nbytes)
    return data


def _warn_not_pinned(nbytes: int) -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(
            f"{nbytes / 2**20:.0f} MiB of host memory could not be pinned: the limit of locked memory is reached "
            "(`ulimit -l`). Copies to and from the device are slower, and no longer overlap with its work.",
            stacklevel=2,
        )
