"""Reading what ``torch.save`` wrote as data: tensors, numbers, strings and containers of them, within limits.

The tensors are views of the file's bytes, except in the format of torch before 1.6. Nothing is allocated that the file
only claims: a storage must be in it, and a tensor in its storage.

Other classes are read by ``torch.load(weights_only=True)``, after the same limits: those that a user or fairshard has
trusted with ``torch.serialization.add_safe_globals``, and torch's own functions for unusual tensors.
"""

from __future__ import annotations

import io
import mmap
import os
import sys
from collections import Counter, OrderedDict
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

from fairshard.checkpoint.archive import Record, find_records, is_archive
from fairshard.checkpoint.metadata_pickle import DTYPES, layout_of, size_of
from fairshard.checkpoint.pickle_limits import LIMITS, Budget, Call, Limits, Names, UnknownName
from fairshard.checkpoint.plain_pickle import read_pickle
from fairshard.checkpoint.storage import open_regular
from fairshard.checkpoint.tensor_storages import STORAGES, Storage, Storages

_TENSOR = 1024  # bytes of a tensor object, for the budget
_MAX_COPIED = 1 << 26
_MAX_TRUSTED_NBYTES = 1 << 20
_STORED = 64  # bytes of an item that is made from an argument

_UNTYPED = ("torch.storage", "UntypedStorage")


def read_object(data: Any, limits: Limits = LIMITS) -> Any:
    """Read the bytes of a file of ``torch.save``: bytes, or a writable memoryview that the tensors then share.

    Raises:
        UnpicklingError: it holds more than data, is damaged, or exceeds ``limits``.
        ArchiveError: it is damaged, or was not written by ``torch.save``.
    """
    view = memoryview(bytearray(data) if isinstance(data, bytes) else data)
    return _read_archive(view, limits) if is_archive(view) else _read_old(view, limits)


def read_object_file(path: str | os.PathLike[str], limits: Limits = LIMITS) -> Any:
    """Read a file of ``torch.save``; its tensors are mapped, and need no memory until they are changed.

    Raises:
        OSError: it cannot be read, or is not a regular file.
        UnpicklingError, ArchiveError: see `read_object`.
    """
    with open_regular(path) as file:
        if not os.fstat(file.fileno()).st_size:
            raise UnpicklingError("it is empty")
        return read_object(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)), limits)


# ---- what pickles of torch.save name


def _tensor(args: tuple[Any, ...], budget: Budget) -> Tensor:
    storage, offset, size, strides, requires_grad, hooks, *more = args
    return _made(storage, storage.dtype, (offset, size, strides), (requires_grad, hooks, *more), budget)


def _untyped_tensor(args: tuple[Any, ...], budget: Budget) -> Tensor:
    storage, offset, size, strides, requires_grad, hooks, dtype, *more = args
    return _made(storage, dtype, (offset, size, strides), (requires_grad, hooks, *more), budget)


def _made(storage: Any, dtype: Any, view: tuple[Any, ...], rest: tuple[Any, ...], budget: Budget) -> Tensor:
    budget.take(_TENSOR)
    requires_grad, hooks, *metadata = rest
    if type(storage) is not Storage or type(dtype) is not torch.dtype or type(requires_grad) is not bool:
        raise UnpicklingError("a tensor is not described as torch does")
    if hooks or any(metadata):
        raise UnpicklingError("a tensor has hooks, or is lazily conjugated")
    found = storage.tensor(dtype, *view)
    return found.requires_grad_() if requires_grad else found


def _parameter(args: tuple[Any, ...], budget: Budget) -> Any:
    data, requires_grad, hooks = args
    budget.take(_TENSOR)
    if type(data) is not Tensor or type(requires_grad) is not bool or hooks:
        raise UnpicklingError("a parameter is not described as torch does")
    return nn.Parameter(data, requires_grad)


def _set(args: tuple[Any, ...], budget: Budget) -> set[Any]:
    (items,) = args
    if type(items) is not list:
        raise UnpicklingError("a set is not made of a list")
    budget.take(_SET_NBYTES + _STORED * len(items))
    for item in items:
        if type(item) not in _SIMPLE or (type(item) is int and abs(item) >> 64):
            raise UnpicklingError(f"a set holds a {type(item).__name__}")
    return set(items)


_SIMPLE = frozenset({str, bytes, int, float, bool, type(None), torch.dtype})
_SET_NBYTES = 224


def _counter(args: tuple[Any, ...], budget: Budget) -> Counter[Any]:
    (counts,) = args or ({},)
    if type(counts) is not dict:
        raise UnpicklingError("a counter is not made of a dict")
    budget.take(_SET_NBYTES + _STORED * len(counts))
    return Counter(counts)


def _encoded(args: tuple[Any, ...], budget: Budget) -> bytes:
    text, encoding = args
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise UnpicklingError("bytes are not written as torch does")
    budget.take(len(text))
    return text.encode("latin1")


def _bytearray(args: tuple[Any, ...], budget: Budget) -> bytearray:
    data, *encoding = args or (b"",)
    if type(data) is str:
        return bytearray(_encoded((data, *encoding), budget))
    if type(data) is not bytes:
        raise UnpicklingError("a bytearray is not made of bytes")
    budget.take(len(data))
    return bytearray(data)


def _complex(args: tuple[Any, ...], budget: Budget) -> complex:
    real, imag = args
    if type(real) is not float or type(imag) is not float:
        raise UnpicklingError("a complex number is not made of two numbers")
    return complex(real, imag)


def _device(args: tuple[Any, ...], budget: Budget) -> torch.device:
    kind, *index = args
    if type(kind) is not str or len(kind) > 32 or any(type(each) is not int for each in index):
        raise UnpicklingError("a device is not described as torch does")
    return torch.device(kind, *index)


def _ordered(args: tuple[Any, ...], budget: Budget) -> OrderedDict[Any, Any]:
    if args:
        raise UnpicklingError("an OrderedDict has arguments")
    budget.take(_SET_NBYTES)
    return OrderedDict()


def _build_ordered(made: OrderedDict[Any, Any], state: Any, budget: Budget) -> None:
    """Attributes of a dict, as of ``state_dict()._metadata``."""
    if type(state) is not dict or any(type(name) is not str for name in state):
        raise UnpicklingError("an OrderedDict has attributes without names")
    budget.take(_STORED * len(state))
    vars(made).update(state)


def _names(storages: Storages) -> Names:
    def stored(pid: tuple[Any, ...], budget: Budget) -> Storage:
        kind, dtype, key, _, numel, *view = pid
        if kind != "storage" or any(each is not None for each in view):
            raise UnpicklingError("a storage is not described as torch does")
        return storages.at(dtype, key, numel)

    return Names("data", _VALUES, _CALLS, {OrderedDict: _build_ordered}, stored=stored)


_VALUES = {**DTYPES, **STORAGES, _UNTYPED: torch.uint8}
_CALLS = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _untyped_tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch", "Size"): size_of,
    ("torch", "device"): _device,
    ("torch.serialization", "_get_layout"): layout_of,
    ("collections", "OrderedDict"): _ordered,
    ("collections", "Counter"): _counter,
    ("_codecs", "encode"): _encoded,
    **{(module, "set"): _set for module in ("builtins", "__builtin__")},
    **{(module, "complex"): _complex for module in ("builtins", "__builtin__")},
    **{(module, "bytearray"): _bytearray for module in ("builtins", "__builtin__")},
}


# ---- the two formats


def _read_archive(data: memoryview, limits: Limits) -> Any:
    records = find_records(data)
    if "data.pkl" not in records or "constants.pkl" in records:
        raise UnpicklingError("it is an archive without data")
    own = records["data.pkl"]
    pickled = bytes(data[own.start : own.stop])
    storages = Storages(data, lambda key: records.get(f"data/{key}", Record(0, 0)))
    order = records.get("byteorder")
    if order is not None and bytes(data[order.start : order.stop]) != sys.byteorder.encode():
        return _read_with_torch(data, pickled, storages, limits)
    try:
        return read_pickle(pickled, _names(storages), limits).value
    except UnknownName:
        return _read_with_torch(data, pickled, storages, limits)


def _read_old(data: memoryview, limits: Limits) -> Any:
    """Read the format of torch before 1.6: pickles of a number, a version, the system, the object and the keys of its
    storages, and then each storage, after its number of elements.
    """
    place = 0
    pickles = bytes(data) if len(data) <= _MAX_COPIED else data  # faster to read than a view
    for expected in (MAGIC_NUMBER, PROTOCOL_VERSION, None):
        found = read_pickle(pickles, _NOTHING, limits, place)
        place = found.end
        if expected is not None and found.value != expected:
            raise UnpicklingError("it is not a file of torch.save")
    storages = Storages(data, None)
    found = read_pickle(pickles, _names(storages), limits, place)
    keys = read_pickle(pickles, _NOTHING, limits, found.end)
    if type(keys.value) is not list:
        raise UnpicklingError("the keys of its storages are missing")
    storages.fill(keys.value, keys.end)
    return found.value


_NOTHING = Names("data")


# ---- classes that torch trusts


class _Opaque:
    """An object that only torch's reader makes."""


class _TrustedNames(Names):
    """Names that torch's reader allows, too; what they make stays unknown here, but what is in a file is checked."""

    def find(self, module: Any, name: Any) -> Any:
        """See `Names.find`."""
        try:
            return super().find(module, name)
        except UnknownName as unknown:
            if unknown.path not in _trusted():
                raise
            return Call(_rebuilt if unknown.path == _REBUILT else _opaque)


_REBUILT = "torch._tensor._rebuild_from_type_v2"


def _trusted() -> set[str]:
    """Paths of what torch allows: functions for unusual tensors, and what `add_safe_globals` has added."""
    rebuild = {f"torch._utils.{name}" for name in vars(torch._utils) if name.startswith("_rebuild_")}
    schemes = {str(value) for value in vars(torch).values() if isinstance(value, torch.qscheme)}
    added = torch.serialization.get_safe_globals()
    paths = {each[1] if isinstance(each, tuple) else f"{each.__module__}.{each.__qualname__}" for each in added}
    return {_REBUILT, "torch.Tensor", "torch.nn.parameter.Parameter", *rebuild, *schemes, *paths}


def _opaque(args: tuple[Any, ...], budget: Budget) -> _Opaque:
    budget.take(_TENSOR)
    if any(type(each) is Call for each in args):
        raise UnpicklingError("a function is called with a function")
    return _Opaque()


def _rebuilt(args: tuple[Any, ...], budget: Budget) -> Any:
    rebuild, kind, own, _ = args
    if type(rebuild) is not Call or type(kind) is not Call or type(own) is not tuple:
        raise UnpicklingError("a tensor is not described as torch does")
    rebuild.make(own, budget)
    return _Opaque()


def _read_with_torch(data: memoryview, pickled: bytes, storages: Storages, limits: Limits) -> Any:
    """Read an archive with torch's own reader, if what it describes is within ``limits``.

    Raises:
        UnpicklingError: it is not, or it names what torch does not trust.
    """
    own = _names(storages)
    names = _TrustedNames(own.what, own.values, own.calls, {**own.builds, _Opaque: _ignore}, stored=own.stored)
    read_pickle(pickled, names, limits)
    if len(pickled) > _MAX_TRUSTED_NBYTES + len(data) // 16:
        raise UnpicklingError(f"it describes objects of other classes with {len(pickled):,} bytes")
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _ignore(made: Any, state: Any, budget: Budget) -> None:
    pass
