"""State of flat shards that two rules step: Muon's for matrices, AdamW's for all other parameters.

Such a shard has the state of both rules for all its elements. Under original names each parameter has its own rule's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

_OF_MATRICES = {"momentum_buffer"}
_OF_OTHERS = {"step", "exp_avg", "exp_avg_sq"}


def is_matrix(shape: torch.Size) -> bool:
    """Whether Muon steps a parameter of this shape as a matrix, or as a stack of matrices."""
    return len(shape) in (2, 3)


def keys_of(shape: torch.Size, keys: Collection[str]) -> set[str]:
    """Those of ``keys``, the state of a shard, that a parameter of ``shape`` has."""
    if set(keys) != _OF_MATRICES | _OF_OTHERS:
        return set(keys)
    return _OF_MATRICES if is_matrix(shape) else _OF_OTHERS


def fit_together(shapes: Sequence[torch.Size], entries: Sequence[Mapping[str, Any] | None]) -> bool:
    """Whether the state of parameters of ``shapes`` can be that of one shard: all have the same keys, or their own."""
    present = [(shape, entry) for shape, entry in zip(shapes, entries, strict=True) if entry is not None]
    every = {key for _, entry in present for key in entry}
    return all(entry.keys() == keys_of(shape, every) for shape, entry in present)
