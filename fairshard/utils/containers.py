"""fairscale's helpers for nested arguments; those that the engine itself uses are in ``nested.py``."""

from typing import Any

import torch
from torch import Tensor

from fairshard.utils.nested import apply_to_tensors

__all__ = ["apply_to_tensors", "cast_inputs_to_fp16", "pack_kwargs", "unpack_kwargs"]


def cast_inputs_to_fp16(
    *args: Any, dtype: torch.dtype = torch.float16, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with every floating tensor cast to ``dtype``, differentiably; others are unchanged."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return apply_to_tensors(cast, args), apply_to_tensors(cast, kwargs)


def pack_kwargs(*args: Any, **kwargs: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Positional and keyword arguments as ``(keys, values)``; ``values`` ends with the keyword values."""
    return tuple(kwargs), (*args, *kwargs.values())


def unpack_kwargs(keys: tuple[str, ...], values: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Undo `pack_kwargs`.

    Raises:
        ValueError: there are fewer values than keys.
    """
    if len(keys) > len(values):
        raise ValueError(f"`values` must hold one value for each of {len(keys)} keys, but holds {len(values)}.")
    split = len(values) - len(keys)
    return tuple(values[:split]), dict(zip(keys, values[split:], strict=True))
