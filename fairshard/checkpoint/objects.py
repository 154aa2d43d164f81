"""Reading what ``torch.save`` wrote as data: tensors, numbers, strings and containers of them.

The pickle is read as data first (``bags.py``); then each bag becomes an object, by a function that checks what it
holds. A storage must be in the file, and a tensor in its storage: nothing is allocated that the file only claims.

Other classes are read by ``torch.load(weights_only=True)``: those that a user or fairshard has trusted with
``torch.serialization.add_safe_globals``, and torch's own functions for unusual tensors. Before torch 2.10 that reader
could be made to corrupt memory (CVE-2026-24747), so there they are refused.
"""

from __future__ import annotations

import io
import mmap
import os
import struct
import sys
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from math import prod
from pickle import UnpicklingError
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor, nn

from fairshard.checkpoint.bags import PLAIN, STORED, Bag, Name, is_short, read_pickle
from fairshard.checkpoint.metadata import DTYPES, LAYOUTS, dtype_of, shape_of
from fairshard.checkpoint.storage import open_regular

_MAX_COPIES = 8
_MAX_EXTRA_NBYTES = 1 << 26
_MAX_DEPTH = 200
_SAFE_SINCE = "2.10"
_STORAGES: dict[str, torch.dtype] = {
    "torch.storage.UntypedStorage": torch.uint8,
    **{
        f"torch.{name}Storage": getattr(torch, dtype)
        for name, dtype in (
            *(("Float", "float32"), ("Double", "float64"), ("Half", "float16"), ("BFloat16", "bfloat16")),
            *(("Byte", "uint8"), ("Char", "int8"), ("Short", "int16"), ("Int", "int32"), ("Long", "int64")),
            *(("Bool", "bool"), ("ComplexFloat", "complex64"), ("ComplexDouble", "complex128")),
            *(("QInt8", "qint8"), ("QUInt8", "quint8"), ("QInt32", "qint32")),
        )
    },
}


def read_object(data: memoryview) -> Any:
    """Read the bytes of a file of ``torch.save``, with whose memory tensors then share theirs.

    Raises:
        UnpicklingError: they hold more than data, are damaged, or claim what they have not.
        BadZipFile: they are damaged.
    """
    if bytes(data[:4]) != b"PK\x03\x04":
        raise UnpicklingError("it is not an archive, as torch.save writes since torch 1.6")
    file: Any = io.BufferedReader(_Bytes(data))
    archive = zipfile.ZipFile(file)
    records = {info.filename.partition("/")[2]: _record(info, data) for info in archive.infolist()}
    if len(records) < len(archive.infolist()):
        raise UnpicklingError("its archive has two records of one name")
    if "data.pkl" not in records or "constants.pkl" in records:
        raise UnpicklingError("it is an archive without data")
    value, names = read_pickle(io.BytesIO(records["data.pkl"]))
    if names <= _KNOWN and records.get("byteorder", b"") in (b"", sys.byteorder.encode()):
        return _Objects(records, len(data)).made(value)
    return _read_with_torch(file, sorted(names - _KNOWN))


def read_object_file(path: str | os.PathLike[str]) -> Any:
    """Read a file of ``torch.save``; its tensors are mapped, and need no memory until they are changed.

    Raises:
        OSError: it cannot be read, or is not a regular file.
        UnpicklingError, BadZipFile: see `read_object`.
    """
    with open_regular(path) as file:
        if not os.fstat(file.fileno()).st_size:
            raise UnpicklingError("it is empty")
        return read_object(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)))


class _Bytes(io.RawIOBase):
    """Memory as a file."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._place = 0

    def readable(self) -> bool:
        """Always True."""
        return True

    def seekable(self) -> bool:
        """Always True."""
        return True

    def readinto(self, target: Any) -> int:
        """Fill ``target`` from the current place on."""
        found = self._data[self._place : self._place + len(target)]
        target[: len(found)] = found
        self._place += len(found)
        return len(found)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to another place."""
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: len(self._data)}[whence]
        self._place = max(begin + offset, 0)
        return self._place


def _record(info: zipfile.ZipInfo, data: memoryview) -> memoryview:
    """The bytes of a record, which lie behind a header of its own.

    Raises:
        UnpicklingError: they are compressed, or not all in the file.
    """
    name_nbytes, extra_nbytes = struct.unpack_from("<HH", data, info.header_offset + 26)
    start = info.header_offset + 30 + name_nbytes + extra_nbytes
    if info.compress_type != zipfile.ZIP_STORED:
        raise UnpicklingError(f"its record {info.filename!r:.80} is compressed, which torch.save never does")
    if start + info.file_size > len(data):
        raise UnpicklingError(f"it ends before its record {info.filename!r:.80} does")
    return data[start : start + info.file_size]


def _read_with_torch(file: IO[bytes], unknown: Sequence[str]) -> Any:
    """Read an archive with torch's own reader, which knows more classes, and the other byte order.

    Raises:
        UnpicklingError: it does not know all of ``unknown`` either, or is not safe.
    """
    problem = f"it holds more than data: it names {', '.join(unknown):.300}"
    if torch.__version__ < _SAFE_SINCE:  # torch's own type, which compares numbers
        raise UnpicklingError(f"{problem}, which torch reads safely since version {_SAFE_SINCE}")
    file.seek(0)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise UnpicklingError(problem) from error


class _Storage(NamedTuple):
    dtype: torch.dtype
    memory: torch.UntypedStorage


class _Objects:
    """Makes the objects of an archive, whose ``records`` hold the storages.

    Tensors of all of them may have at most a few times the bytes of the file.
    """

    def __init__(self, records: dict[str, memoryview], nbytes: int) -> None:
        self._records = records
        self._known: dict[int, tuple[Any, Any]] = {}  # by id: the value, so that it lives, and what was made of it
        self._memory: dict[str, torch.UntypedStorage] = {}
        self._left = _MAX_COPIES * nbytes + _MAX_EXTRA_NBYTES
        self._depth = 0

    def made(self, value: Any) -> Any:
        """``value`` with objects in the place of bags.

        Raises:
            UnpicklingError: a bag is no data, or is damaged, or values are inside each other too deep.
        """
        if type(value) in PLAIN:
            return value
        if type(value) is Name:
            return _STORAGES.get(value.path) or dtype_of(value)
        if id(value) not in self._known:
            if self._depth > _MAX_DEPTH:
                raise UnpicklingError(f"it has containers inside each other to a depth of more than {_MAX_DEPTH}")
            self._depth += 1
            self._known[id(value)] = value, self._new(value)
            self._depth -= 1
        return self._known[id(value)][1]

    def _new(self, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(map(self.made, value))
        if type(value) is dict:
            return self._items(value)
        if value.path not in _MAKE:
            raise UnpicklingError(f"it holds more than data: it names {value.path:.200}")
        made = _MAKE[value.path](self, *self.made(value.args))
        if type(made) is OrderedDict:
            made.update(self._items(value.items))
            vars(made).update(self.made(value.state or {}))  # such as the `_metadata` of a state dict
        elif value.items or value.state is not None:
            raise UnpicklingError(f"it sets attributes of a {value.path}")
        return made

    def _items(self, items: dict[Any, Any]) -> dict[Any, Any]:
        if any(type(key) is Bag for key in items):
            raise UnpicklingError("a key is an object")
        return {self.made(key) if type(key) is Name else key: self.made(each) for key, each in items.items()}

    def storage(self, kind: Any, dtype: Any, key: Any, _: Any, numel: Any, *view: Any) -> _Storage:
        """A storage, in the memory of its record."""
        if kind != "storage" or any(each is not None for each in view) or type(dtype) is not torch.dtype:
            raise UnpicklingError("a storage is not described as torch does")
        (numel,) = shape_of((numel,))
        record, nbytes = self._records.get(f"data/{key}", memoryview(b"")), numel * dtype.itemsize
        if record.nbytes < nbytes:
            raise UnpicklingError(f"it has {record.nbytes:,} of the {nbytes:,} bytes of a tensor")
        if key not in self._memory:
            found = torch.frombuffer(record, dtype=torch.uint8) if record.nbytes else torch.empty(0, device="cpu")
            self._memory[key] = (found.clone() if found.data_ptr() % dtype.itemsize else found).untyped_storage()
        return _Storage(dtype, self._memory[key])

    def tensor(self, storage: Any, *described: Any) -> Tensor:
        """A tensor of a storage that has a dtype."""
        return self.untyped_tensor(storage, *described[:5], storage.dtype, *described[5:])

    def untyped_tensor(self, storage: Any, *described: Any) -> Tensor:
        """A tensor of a storage.

        Raises:
            UnpicklingError: it is not inside of the storage, or has more than its elements.
        """
        offset, size, strides, requires_grad, hooks, dtype, *more = described
        shape, steps, (begin,) = shape_of(size), shape_of(strides), shape_of((offset,))
        if type(storage) is not _Storage or len(shape) != len(steps) or hooks or any(more):
            raise UnpicklingError("a tensor is not described as torch does, or has hooks, or is lazily conjugated")
        numel = prod(shape)
        last = begin + sum((length - 1) * step for length, step in zip(shape, steps, strict=True))
        if (last + 1 if numel else begin) * dtype.itemsize > storage.memory.nbytes():
            raise UnpicklingError(f"a tensor of shape {tuple(shape)} is larger than its storage")
        self._left -= numel * dtype.itemsize
        if self._left < 0:
            raise UnpicklingError("its tensors have far more bytes than it")
        found = torch.empty(0, dtype=dtype, device="cpu").set_(storage.memory, begin, shape, steps)
        return found.requires_grad_(requires_grad)


def _of(make: Callable[..., Any], *kinds: type) -> Callable[..., Any]:
    """``make``, which takes arguments of exactly these ``kinds``; the last ones may be left out."""

    def checked(_: _Objects, *args: Any) -> Any:
        if len(args) > len(kinds) or any(type(arg) is not kind for arg, kind in zip(args, kinds, strict=False)):
            raise UnpicklingError(f"a {getattr(make, '__name__', make)} is not described as torch does")
        return make(*args)

    return checked


def _set(_: _Objects, items: Any) -> set[Any]:
    if type(items) is not list or not all(is_short(item) or type(item) is torch.dtype for item in items):
        raise UnpicklingError("a set holds more than plain values")
    return set(items)


def _encoded(_: _Objects, text: Any = b"", encoding: Any = "latin1") -> bytes:
    if type(text) not in (str, bytes) or encoding not in ("latin1", "latin-1"):  # others may be slow
        raise UnpicklingError("bytes are not written as torch does")
    return text if type(text) is bytes else text.encode("latin1")


_MAKE: dict[str, Callable[..., Any]] = {
    STORED: _Objects.storage,
    "torch._utils._rebuild_tensor_v2": _Objects.tensor,
    "torch._utils._rebuild_tensor_v3": _Objects.untyped_tensor,
    "torch._utils._rebuild_parameter": lambda _, data, requires_grad, hooks: nn.Parameter(data, requires_grad),
    "torch.Size": lambda _, sizes: shape_of(sizes),
    "torch.device": _of(torch.device, str, int),
    "torch.serialization._get_layout": lambda _, name: LAYOUTS[name],
    "collections.OrderedDict": _of(OrderedDict),
    "collections.Counter": _of(Counter, dict),
    "_codecs.encode": _encoded,
    **{f"{module}.set": _set for module in ("builtins", "__builtin__")},
    **{f"{module}.complex": _of(complex, float, float) for module in ("builtins", "__builtin__")},
    **{
        f"{module}.bytearray": lambda own, *args: bytearray(_encoded(own, *args))
        for module in ("builtins", "__builtin__")
    },
}
_KNOWN = {*_MAKE, *_STORAGES, *DTYPES}
