"""Optimizers that quantise their state in blocks, torchao's 8-bit, 4-bit and fp8 Adams, over parameters cut by blocks.

Each rank quantises the tensors that it has. The bits are those of one process if every block of a part is a block of
the whole parameter: see the guide to placements for the rows that `RowBlocks` needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fairshard.utils.ragged_tensor import RaggedTensor, ragged_like

_NEW_BUFFER = "_new_buffer"
_adapted: set[type] = set()


def has_block_state(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` is one of torchao's that quantise their state."""
    is_known = any(base.__module__.startswith("torchao.") for base in type(optimizer).__mro__)
    return is_known and isinstance(getattr(optimizer, "block_size", None), int)  # infinity: no quantisation


def adapt_blocks(optimizer: Optimizer) -> None:
    """Make torchao's optimizers create state that is placed like the parameter, if that is placed by blocks.

    They would wrap it in a plain DTensor, for which torch's operators assume even chunks.
    """
    for base in type(optimizer).__mro__ if has_block_state(optimizer) else ():
        if _NEW_BUFFER in vars(base) and base not in _adapted:
            _adapted.add(base)
            setattr(base, _NEW_BUFFER, _placed(vars(base)[_NEW_BUFFER]))


def _placed(new_buffer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(new_buffer)
    def create(optimizer: Optimizer, param: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(param, RaggedTensor):
            return new_buffer(optimizer, param, *args, **kwargs)
        return ragged_like(new_buffer(optimizer, param.to_local(), *args, **kwargs), param)

    return create
