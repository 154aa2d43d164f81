"""Map a function over the tensors of nested arguments, keeping every container's type."""

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_SEEN = (Tensor, PackedSequence, *_PLAIN)


def apply_to_tensors(fn: Callable[[Tensor], Any], container: Any) -> Any:
    """``container`` with ``fn`` applied to every tensor in it.

    Handles tuples (named ones too), lists, sets, all kinds of dictionaries (``OrderedDict``, ``defaultdict``, Hugging
    Face's ``ModelOutput``), dataclasses and ``PackedSequence``; each keeps its type. Objects of other types are
    returned unchanged.
    """
    if isinstance(container, Tensor):
        return fn(container)
    if isinstance(container, _PLAIN):
        return container
    if isinstance(container, PackedSequence):
        return PackedSequence(fn(container.data), *container[1:])
    if isinstance(container, tuple):
        values = [apply_to_tensors(fn, value) for value in container]
        return type(container)(*values) if hasattr(container, "_fields") else type(container)(values)
    if isinstance(container, (list, set, frozenset)):
        return type(container)([apply_to_tensors(fn, value) for value in container])
    if isinstance(container, Mapping):
        return _map_dict(fn, container)
    if dataclasses.is_dataclass(container) and not isinstance(container, type):
        return _map_dataclass(fn, container)
    return container


def is_transparent(container: Any) -> bool:
    """Whether `apply_to_tensors` reaches every tensor of ``container``: it contains no unknown types."""
    if isinstance(container, _SEEN):
        return True
    if isinstance(container, Mapping):
        return all(is_transparent(value) for value in container.values())
    if isinstance(container, (tuple, list, set, frozenset)):
        return all(is_transparent(value) for value in container)
    if dataclasses.is_dataclass(container) and not isinstance(container, type):
        return all(is_transparent(getattr(container, f.name, None)) for f in dataclasses.fields(container))
    return False


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


def cast_inputs_to_fp16(
    *args: Any, dtype: torch.dtype = torch.float16, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with every floating tensor cast to ``dtype``, differentiably; others are unchanged."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return apply_to_tensors(cast, args), apply_to_tensors(cast, kwargs)


def _map_dict(fn: Callable[[Tensor], Any], container: Mapping[Any, Any]) -> Any:
    items = {key: apply_to_tensors(fn, value) for key, value in container.items()}
    if type(container) is dict:
        return items
    if isinstance(container, defaultdict):
        return type(container)(container.default_factory, items)
    if dataclasses.is_dataclass(container):  # ModelOutput: a dataclass that is also an OrderedDict
        return type(container)(**items)
    return type(container)(items) if not isinstance(container, OrderedDict) else type(container)(items.items())  # type: ignore[call-arg]


def _map_dataclass(fn: Callable[[Tensor], Any], container: Any) -> Any:
    fields = [f.name for f in dataclasses.fields(container) if hasattr(container, f.name)]
    mapped = object.__new__(type(container))
    mapped.__dict__.update(getattr(container, "__dict__", {}))
    for name in fields:  # bypass __init__: the copy must not depend on init=False fields or __post_init__
        object.__setattr__(mapped, name, apply_to_tensors(fn, getattr(container, name)))
    return mapped
