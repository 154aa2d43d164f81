"""The caches of DTensor, which keep meshes, and with them process groups, alive."""

from __future__ import annotations

import importlib
import sys

import torch

_NAMES = ("_clear_sharding_prop_cache", "_clear_python_sharding_prop_cache")  # the second in older torch


def clear_dtensor_caches(device: torch.device | str) -> None:
    """Clear those of this thread, and of the thread in which autograd runs backwards for ``device``."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    debug = importlib.import_module("torch.distributed.tensor.debug")
    clear = next((getattr(debug, name) for name in _NAMES if hasattr(debug, name)), None)
    if clear is None:
        return
    clear()
    probe = torch.ones((), device=device, requires_grad=True)
    probe.register_hook(lambda _: clear())
    probe.backward()
