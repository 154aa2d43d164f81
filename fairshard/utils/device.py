"""Which devices there are, and what differs between them. The only file that names a vendor.

Every device that torch knows as an accelerator takes the same path, by `torch.get_device_module`; streams and events
are in ``streams.py``.
"""

import os
from typing import Any

import torch
from torch import Tensor

from fairshard.utils.host import peak_resident_memory, resident_memory
from fairshard.utils.streams import is_asynchronous

_UNSUPPORTED = {"mps": "torch.distributed has no collectives for it"}


def check_supported(device: torch.device) -> None:
    """Check that models can compute on ``device``.

    Raises:
        ValueError: they cannot.
    """
    if device.type in _UNSUPPORTED:
        raise ValueError(
            f"A model must compute on the CPU or on an accelerator with collectives, but is on {device}: "
            f"{_UNSUPPORTED[device.type]}. Move the module to the CPU."
        )


def check_device_type(name: str, given: str) -> None:
    """Check that ``given``, the argument ``name``, is a type of device on which models can compute.

    Raises:
        ValueError: it is not.
    """
    try:
        device = torch.device(given)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "meta" or device.index is not None:
        raise ValueError(f'`{name}` must be a type of device, such as "cpu", "cuda" or "xpu", but is {given!r}.')
    check_supported(device)


def default_device_type() -> str:
    """The type of the accelerator if one can be used, otherwise ``"cpu"``."""
    if not torch.accelerator.is_available():
        return "cpu"
    found = torch.accelerator.current_accelerator()
    return "cpu" if found is None or found.type in _UNSUPPORTED else found.type


def current_device() -> torch.device:
    """The accelerator that new tensors of its type go to."""
    kind = default_device_type()
    return torch.device(kind, _module_of(kind).current_device())


def accelerators_in_use() -> list[torch.device]:
    """The current accelerator, if this process has used any."""
    kind = default_device_type()
    return [current_device()] if kind != "cpu" and _module_of(kind).is_initialized() else []


def device_count(kind: str | None = None) -> int:
    """Number of accelerators that this process sees, of type ``kind`` if given; 0 without."""
    found = default_device_type()
    if found == "cpu" or kind not in (None, found):
        return 0
    count: int = _module_of(found).device_count()
    return count


def set_device(device: torch.device) -> None:
    """Make ``device`` the current one of its type; no effect on CPU."""
    if is_asynchronous(device):
        _module_of(device.type).set_device(device)


def take_device(kind: str, rank: int) -> None:
    """Make device ``rank`` of type ``kind``, modulo their number, the current one of this process.

    NCCL refuses ranks of one host that share a device, so such ranks get different host ids.
    """
    host, index = divmod(rank, device_count(kind))
    if host:
        os.environ["NCCL_HOSTID"] = f"fairshard-{host}"
    set_device(torch.device(kind, index))


def memory_allocated(device: torch.device) -> int:
    """Bytes held now: by tensors on an accelerator, by the whole process (resident) on CPU."""
    if not is_asynchronous(device):
        return resident_memory()
    nbytes: int = _module_of(device.type).memory_allocated(device)
    return nbytes


def peak_memory(device: torch.device) -> int:
    """The most bytes held so far: by tensors on an accelerator, by the whole process (resident) on CPU."""
    if not is_asynchronous(device):
        return peak_resident_memory()
    nbytes: int = _module_of(device.type).max_memory_allocated(device)
    return nbytes


def accelerator_rng_state() -> Tensor | None:
    """State of the current accelerator's random number generator; None without one."""
    kind = default_device_type()
    return None if kind == "cpu" else _module_of(kind).get_rng_state()


def set_accelerator_rng_state(saved: Tensor | None) -> None:
    """Restore the state, if there is an accelerator and ``saved`` is not None."""
    kind = default_device_type()
    if saved is not None and kind != "cpu":
        _module_of(kind).set_rng_state(saved)


def _module_of(kind: str) -> Any:
    """torch's module for the devices of type ``kind``, such as torch.xpu."""
    return torch.get_device_module(kind)
