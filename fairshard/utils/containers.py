"""fairscale's helpers for nested arguments; those that the engine itself uses are in ``nested.py``."""

from typing import Any

from fairshard.utils.nested import apply_to_tensors, cast_inputs_to_fp16

__all__ = ["apply_to_tensors", "cast_inputs_to_fp16", "pack_kwargs", "unpack_kwargs"]


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
