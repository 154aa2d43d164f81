"""The random number generators of one rank: torch's on the CPU and this rank's accelerator, Python's and numpy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from fairshard.utils.device import accelerator_rng_state, set_accelerator_rng_state

_NUM_KEYS = 624


def state() -> dict[str, Any]:
    """State of all generators, as tensors and numbers."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "gpu": accelerator_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
    }


def check(saved: dict[str, Any]) -> None:
    """Check that ``saved`` can be restored; the generators do not change.

    Raises:
        Exception: it cannot; of any kind.
    """
    kind, keys, position, *_ = saved["numpy"]
    if kind != "MT19937" or keys.shape != (_NUM_KEYS,) or not 0 <= position <= _NUM_KEYS:
        raise ValueError("the state of numpy's generator is damaged")  # numpy itself would read outside of the keys
    current = state()
    try:
        restore(saved)
    finally:
        restore(current)


def restore(saved: dict[str, Any]) -> None:
    """Restore the state ``saved``."""
    torch.set_rng_state(saved["torch"])
    set_accelerator_rng_state(saved["gpu"])
    version, internal, gauss_next = saved["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, *rest = saved["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
