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
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

from fairshard.checkpoint.bags import PLAIN, STORED, Bag, Name, Read, is_short, read_pickle
from fairshard.checkpoint.metadata import DTYPES, dtype_of, layout_of, shape_of
from fairshard.checkpoint.storage import open_regular

_MAX_COPIES = 8
_MAX_EXTRA_NBYTES = 1 << 26
_MAX_DEPTH = 200
_SAFE_SINCE = "2.10"
_STORAGES: dict[str, torch.dtype] = {
    f"torch.{name}Storage": getattr(torch, dtype)
    for name, dtype in (
        ("Float", "float32"),
        ("Double", "float64"),
        ("Half", "float16"),
        ("BFloat16", "bfloat16"),
        ("Byte", "uint8"),
        ("Char", "int8"),
        ("Short", "int16"),
        ("Int", "int32"),
        ("Long", "int64"),
        ("Bool", "bool"),
        ("ComplexFloat", "complex64"),
        ("ComplexDouble", "complex128"),
        ("QInt8", "qint8"),
        ("QUInt8", "quint8"),
        ("QInt32", "qint32"),
    )
}
_STORAGES["torch.storage.UntypedStorage"] = torch.uint8


class _Span(NamedTuple):
    """The bytes ``[start, start + nbytes)`` of a file."""

    start: int
    nbytes: int


class Room:
    """Memory that objects are read into, one after the other: new memory costs more than reading."""

    def __init__(self) -> None:
        self._data = bytearray()

    def of(self, nbytes: int) -> memoryview:
        """The first bytes."""
        if len(self._data) < nbytes:
            self._data = bytearray()
            self._data = bytearray(nbytes)
        return memoryview(self._data)[:nbytes]


def read_object(file: Any, nbytes: int, room: Room) -> Any:
    """Read the next ``nbytes`` of ``file``, which ``torch.save`` wrote, into ``room``; tensors share that memory.

    Raises:
        OSError: there are fewer.
        UnpicklingError: they hold more than data, are damaged, or claim what they have not.
        BadZipFile: they are damaged.
    """
    data = room.of(nbytes)
    done = 0
    while done < nbytes:
        count = file.readinto(data[done:])
        if not count:
            raise OSError("the file ends too early")
        done += count
    return _read(data)


def read_object_file(path: str | os.PathLike[str]) -> Any:
    """Read a file of ``torch.save``; its tensors are mapped, and need no memory until they are changed.

    Raises:
        OSError: it cannot be read, or is not a regular file.
        UnpicklingError, BadZipFile: see `read_object`.
    """
    with open_regular(path) as file:
        if not os.fstat(file.fileno()).st_size:
            raise UnpicklingError("it is empty")
        return _read(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)))


# ---- the two formats


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


def _read(data: memoryview) -> Any:
    """Read a file of ``torch.save``, with whose memory tensors then share theirs."""
    file: Any = io.BufferedReader(_Bytes(data))
    if bytes(data[:4]) != b"PK\x03\x04":
        return _read_old(file, data)
    archive = zipfile.ZipFile(file)
    infos = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if len(infos) < len(archive.infolist()):
        raise UnpicklingError("its archive has two records of one name")
    spans = {name: _span_of(info, data) for name, info in infos.items()}
    if "data.pkl" not in spans or "constants.pkl" in spans:
        raise UnpicklingError("it is an archive without data")
    own, order = spans["data.pkl"], spans.get("byteorder", _Span(0, 0))
    read = read_pickle(io.BytesIO(data[own.start : own.start + own.nbytes]))
    if read.names <= _KNOWN and data[order.start : order.start + order.nbytes] in (b"", sys.byteorder.encode()):
        return _Objects(data, lambda key: spans.get(f"data/{key}", _Span(0, 0))).made(read.value)
    return _read_with_torch(file, sorted(read.names - _KNOWN))


def _span_of(info: zipfile.ZipInfo, data: memoryview) -> _Span:
    """Where the bytes of a record are, which lie behind a header of its own.

    Raises:
        UnpicklingError: they are compressed, or not all in the file.
    """
    name_nbytes, extra_nbytes = struct.unpack_from("<HH", data, info.header_offset + 26)
    start = info.header_offset + 30 + name_nbytes + extra_nbytes
    if info.compress_type != zipfile.ZIP_STORED:
        raise UnpicklingError(f"its record {info.filename!r:.80} is compressed, which torch.save never does")
    if start + info.file_size > len(data):
        raise UnpicklingError(f"it ends before its record {info.filename!r:.80} does")
    return _Span(start, info.file_size)


def _read_old(file: IO[bytes], data: memoryview) -> Any:
    """Read the format of torch before 1.6: pickles of a number, a version, the system, the object and the keys of its
    storages, and then each storage, after its number of elements.
    """
    head = [read_pickle(file).value for _ in range(3)]
    if type(head[0]) is not int or head[:2] != [MAGIC_NUMBER, PROTOCOL_VERSION]:
        raise UnpicklingError("it is not a file of torch.save")
    read, keys = read_pickle(file), read_pickle(file).value
    spans: dict[str, _Span] = {}
    itemsizes = _itemsizes_of(read)
    place = file.tell()
    for key in keys:
        (numel,) = struct.unpack_from("<q", data, place)
        spans[key] = _Span(place + 8, numel * itemsizes[key])
        place += 8 + spans[key].nbytes
        if numel < 0 or place > len(data):
            raise UnpicklingError("its storages are damaged, or end too early")
    return _Objects(data, spans.__getitem__).made(read.value)


def _itemsizes_of(read: Read) -> dict[str, int]:
    """Bytes of an element of each storage, by key."""
    return {key: _dtype_of_storage(kind).itemsize for _, kind, key, *_ in read.stored}


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


# ---- objects


class _Objects:
    """Makes the objects of a file, whose storages ``find`` finds by key.

    Tensors of all of them may have at most a few times the bytes of the file.
    """

    def __init__(self, data: memoryview, find: Callable[[str], _Span]) -> None:
        self._data = data
        self._find = find
        self._known: dict[int, tuple[Any, Any]] = {}  # by id: the value, so that it lives, and what was made of it
        self._memory: dict[str, torch.UntypedStorage] = {}
        self._left = _MAX_COPIES * len(data) + _MAX_EXTRA_NBYTES
        self._depth = 0

    def made(self, value: Any) -> Any:
        """``value`` with objects in the place of bags.

        Raises:
            UnpicklingError: a bag is no data, or is damaged, or values are inside each other too deep.
        """
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is Name:
            return dtype_of(value) if value.path not in _STORAGES else _STORAGES[value.path]
        if id(value) not in self._known:
            if self._depth > _MAX_DEPTH:
                raise UnpicklingError(f"it has containers inside each other to a depth of more than {_MAX_DEPTH}")
            self._depth += 1
            self._known[id(value)] = value, self._new(value)
            self._depth -= 1
        return self._known[id(value)][1]

    def _new(self, value: Any) -> Any:
        if type(value) is list:
            return [self.made(each) for each in value]
        if type(value) is tuple:
            return tuple(self.made(each) for each in value)
        if type(value) is dict:
            return self._items(value)
        assert type(value) is Bag
        if value.path == STORED:
            return self._storage(*self.made(value.args))
        make = _MAKE.get(value.path)
        if make is None:
            raise UnpicklingError(f"it holds more than data: it names {value.path:.200}")
        made = make(self, *self.made(value.args))
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

    def _storage(self, kind: Any, dtype: Any, key: Any, _: Any, numel: Any, *view: Any) -> _Storage:
        if kind != "storage" or any(each is not None for each in view) or type(key) is not str:
            raise UnpicklingError("a storage is not described as torch does")
        (numel,) = shape_of((numel,))
        span, nbytes = self._find(key), numel * dtype.itemsize
        if span.nbytes < nbytes:
            raise UnpicklingError(f"it has {span.nbytes:,} of the {nbytes:,} bytes of a tensor")
        if key not in self._memory:
            self._memory[key] = self._memory_at(span, dtype.itemsize)
        return _Storage(dtype, self._memory[key])

    def _memory_at(self, span: _Span, itemsize: int) -> torch.UntypedStorage:
        if not span.nbytes:
            return torch.UntypedStorage(0)
        found = torch.frombuffer(self._data, dtype=torch.uint8, count=span.nbytes, offset=span.start)
        return (found.clone() if found.data_ptr() % itemsize else found).untyped_storage()

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
        if type(storage) is not _Storage or len(shape) != len(steps) or type(requires_grad) is not bool:
            raise UnpicklingError("a tensor is not described as torch does")
        if hooks or any(more):
            raise UnpicklingError("a tensor has hooks, or is lazily conjugated")
        numel = prod(shape)
        last = begin + sum((length - 1) * step for length, step in zip(shape, steps, strict=True))
        if (last + 1 if numel else begin) * dtype.itemsize > storage.memory.nbytes():
            raise UnpicklingError(f"a tensor of shape {tuple(shape)} is larger than its storage")
        self._left -= numel * dtype.itemsize
        if self._left < 0:
            raise UnpicklingError("its tensors have far more bytes than it")
        found = torch.empty(0, dtype=dtype, device="cpu").set_(storage.memory, begin, shape, steps)
        return found.requires_grad_(requires_grad)


class _Storage(NamedTuple):
    dtype: torch.dtype
    memory: torch.UntypedStorage


def _dtype_of_storage(name: Any) -> torch.dtype:
    if type(name) is not Name or name.path not in _STORAGES:
        raise UnpicklingError("a storage is not described as torch does")
    return _STORAGES[name.path]


def _parameter(_: _Objects, data: Any, requires_grad: Any, hooks: Any) -> nn.Parameter:
    if type(data) is not Tensor or type(requires_grad) is not bool or hooks:
        raise UnpicklingError("a parameter is not described as torch does")
    return nn.Parameter(data, requires_grad)


def _set(_: _Objects, items: Any) -> set[Any]:
    if type(items) is not list or not all(is_short(item) or type(item) is torch.dtype for item in items):
        raise UnpicklingError("a set holds more than plain values")
    return set(items)


def _counter(_: _Objects, counts: Any = None) -> Counter[Any]:
    if type(counts) not in (dict, type(None)):
        raise UnpicklingError("a counter is not made of a dict")
    return Counter(counts)


def _encoded(_: _Objects, text: Any, encoding: Any) -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise UnpicklingError("bytes are not written as torch does")
    return text.encode("latin1")


def _bytearray(own: _Objects, data: Any = b"", *encoding: Any) -> bytearray:
    if type(data) is str:
        data = _encoded(own, data, *encoding)
    if type(data) is not bytes:
        raise UnpicklingError("a bytearray is not made of bytes")
    return bytearray(data)


def _complex(_: _Objects, real: Any, imag: Any) -> complex:
    if type(real) is not float or type(imag) is not float:
        raise UnpicklingError("a complex number is not made of two numbers")
    return complex(real, imag)


def _device(_: _Objects, kind: Any, *index: Any) -> torch.device:
    if type(kind) is not str or any(type(each) is not int for each in index):
        raise UnpicklingError("a device is not described as torch does")
    return torch.device(kind, *index)


_MAKE: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _Objects.tensor,
    "torch._utils._rebuild_tensor_v3": _Objects.untyped_tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch.Size": lambda _, sizes: shape_of(sizes),
    "torch.device": _device,
    "torch.serialization._get_layout": lambda _, name: layout_of(name),
    "collections.OrderedDict": lambda _: OrderedDict(),
    "collections.Counter": _counter,
    "_codecs.encode": _encoded,
    **{f"{module}.set": _set for module in ("builtins", "__builtin__")},
    **{f"{module}.complex": _complex for module in ("builtins", "__builtin__")},
    **{f"{module}.bytearray": _bytearray for module in ("builtins", "__builtin__")},
}
_KNOWN = {*_MAKE, *_STORAGES, *DTYPES}
