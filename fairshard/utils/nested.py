"""Map a function over the tensors of nested arguments, keeping every container's type."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_IS_PYTHON_CLASS = 1 << 9  # CPython's Py_TPFLAGS_HEAPTYPE
_MAX_WALKED = 10_000  # objects and containers of an output that are looked into; a cache has some for each layer
_MAX_DEPTH = 100  # containers in each other, to which `apply_to_tensors` recurses
_NOT_WALKED = (Tensor, PackedSequence, *_PLAIN, type)


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
    if isinstance(container, (tuple, list, set, frozenset)):
        values = [apply_to_tensors(fn, value) for value in container]
        return type(container)(*values) if hasattr(container, "_fields") else type(container)(values)
    if isinstance(container, Mapping):
        return _map_dict(fn, container)
    if dataclasses.is_dataclass(container) and not isinstance(container, type):
        return _map_dataclass(fn, container)
    return container


def plain_objects(container: Any) -> list[Any] | None:
    """The objects in ``container`` that keep all they hold in ``__dict__``, such as Hugging Face's caches.

    They are not callable, as modules are, and their classes and all bases are written in Python.
    None: some other object cannot be looked into, or containers hold themselves.
    """
    found: dict[int, Any] = {}
    waiting, num_walked = [(container, 0)], 0
    while waiting:
        one, depth = waiting.pop()
        if isinstance(one, _NOT_WALKED) or id(one) in found:
            continue
        num_walked += 1
        if num_walked > _MAX_WALKED or depth > _MAX_DEPTH:
            return None
        inside: Iterable[Any]
        if isinstance(one, Mapping):
            inside = one.values()
        elif isinstance(one, (tuple, list, set, frozenset)):
            inside = one
        elif dataclasses.is_dataclass(one):
            inside = [getattr(one, field.name, None) for field in dataclasses.fields(one)]
        elif _is_plain_object(one):
            found[id(one)] = one
            inside, depth = vars(one).values(), -1  # each attribute is mapped by itself
        else:
            return None
        waiting += [(value, depth + 1) for value in inside]
    return list(found.values())


def apply_to_all(fn: Callable[[Tensor], Any], container: Any, objects: list[Any] | None) -> Any:
    """`apply_to_tensors`, and in place to attributes of ``objects``, found by `plain_objects`."""
    for one in objects or ():
        for name, value in list(vars(one).items()):
            changed: list[Tensor] = []

            def note(tensor: Tensor, changed: list[Tensor] = changed) -> Any:
                result = fn(tensor)
                if result is not tensor:
                    changed += (tensor,)
                return result

            mapped = apply_to_tensors(note, value)
            if changed:
                vars(one)[name] = mapped
    return apply_to_tensors(fn, container)


class _Empty:
    """Its instances have no memory but for ``__dict__``; those of a class written in C can have more."""


def _is_plain_object(one: Any) -> bool:
    return (
        hasattr(one, "__dict__")
        and type(one).__basicsize__ == _Empty.__basicsize__
        and not callable(one)
        and all(
            cls is object or (cls.__flags__ & _IS_PYTHON_CLASS and not vars(cls).get("__slots__"))
            for cls in type(one).__mro__
        )
    )


def cast_inputs_to_fp16(
    *args: Any, dtype: torch.dtype = torch.float16, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with every floating tensor cast to ``dtype``, differentiably; others are unchanged."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return apply_to_tensors(cast, args), apply_to_tensors(cast, kwargs)


def _map_dict(fn: Callable[[Tensor], Any], container: Mapping[Any, Any]) -> Any:
    items = {key: apply_to_tensors(fn, value) for key, value in container.items()}
    if isinstance(container, defaultdict):
        return type(container)(container.default_factory, items)
    if dataclasses.is_dataclass(container):  # ModelOutput: a dataclass that is also an OrderedDict
        return type(container)(**items)
    return type(container)(items)  # type: ignore[call-arg]


def _map_dataclass(fn: Callable[[Tensor], Any], container: Any) -> Any:
    fields = [f.name for f in dataclasses.fields(container) if hasattr(container, f.name)]
    mapped = object.__new__(type(container))
    mapped.__dict__.update(getattr(container, "__dict__", {}))
    for name in fields:  # bypass __init__: the copy must not depend on init=False fields or __post_init__
        object.__setattr__(mapped, name, apply_to_tensors(fn, getattr(container, name)))
    return mapped
