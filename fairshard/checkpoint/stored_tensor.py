"""Where the elements of a tensor are inside the bytes that ``torch.save`` wrote for it.

A saved tensor is a zip archive whose records are stored as they are::

    header  archive/data.pkl    class of the storage, shape, strides
    header  archive/...         versions, byte order
    header  archive/data/0      the elements, contiguous          <- read straight into the memory of a tensor
    header  archive/...
    directory of the archive
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections import OrderedDict
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

HEAD_NBYTES = 2048
"""The elements of a tensor begin before this byte of what was saved (at byte 704, in torch 2.13)."""

_HEADER = struct.Struct("<4s4xH16xHH")  # signature, compression, lengths of the name and of what follows it
_SIGNATURE, _AFTER_DATA = b"PK\x03\x04", b"PK\x07\x08"
_PICKLE, _ELEMENTS = b"archive/data.pkl", b"archive/data/0"
_STORAGES = {
    f"{name}Storage": getattr(torch, dtype)
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
    )
}


@dataclass(frozen=True)
class StoredTensor:
    """A contiguous tensor whose elements begin at byte ``start`` of what ``torch.save`` wrote."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize

    def is_followed_by(self, rest: bytes) -> bool:
        """Whether ``rest``, the bytes after the elements, is what a zip archive has there."""
        nbytes = self.nbytes
        short, long = struct.pack("<II", nbytes & 0xFFFFFFFF, nbytes & 0xFFFFFFFF), struct.pack("<QQ", nbytes, nbytes)
        return rest[:4] == _AFTER_DATA and (rest[8:16] == short if nbytes < 1 << 32 else rest[8:24] == long)


def find_tensor(head: bytes) -> StoredTensor | None:
    """The tensor of which ``head`` is the beginning; None if it is not one that is stored plainly.

    Then ``torch.load`` must read it: a storage larger than the tensor, other strides, a subclass, another byte order, a
    later format.
    """
    start = _record(head, _ELEMENTS)
    described = _record(head, _PICKLE)
    if start is None or described is None or b"little" not in head or sys.byteorder != "little":
        return None
    try:
        found = _Unpickler(io.BytesIO(head[described:])).load()
    except Exception:  # torch.load reports what is wrong with it
        return None
    return StoredTensor(found.dtype, found.shape, start) if isinstance(found, _Described) else None


def _record(head: bytes, name: bytes) -> int | None:
    """Where the bytes of the record ``name`` begin."""
    place = head.find(name) - _HEADER.size
    if place < 0:
        return None
    signature, compression, name_nbytes, nbytes = _HEADER.unpack_from(head, place)
    if signature != _SIGNATURE or compression or name_nbytes != len(name):
        return None
    start = int(place + _HEADER.size + name_nbytes + nbytes)
    return start if start <= len(head) else None


@dataclass(frozen=True)
class _Described:
    dtype: torch.dtype
    shape: tuple[int, ...]


def _described(
    storage: tuple[torch.dtype, int], offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> _Described:
    """What a pickle says of a tensor.

    Raises:
        ValueError: the tensor is not all of its storage, in order.
    """
    dtype, numel = storage
    expected, step = [], 1
    for size in reversed(shape):
        expected.append(step)
        step *= size
    if offset or step != numel or not numel or tuple(strides) != tuple(reversed(expected)):
        raise ValueError("the storage is not the tensor")
    return _Described(dtype, tuple(shape))


class _Unpickler(pickle.Unpickler):
    """Reads the pickle of one plain tensor; the pickle can name nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _described
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a plain tensor")

    def persistent_load(self, pid: Any) -> tuple[torch.dtype, int]:
        """A storage, as its dtype and its number of elements."""
        _, dtype, key, _, numel = pid
        if key != "0" or not isinstance(dtype, torch.dtype):
            raise ValueError("not the one storage of a tensor")
        return dtype, int(numel)
