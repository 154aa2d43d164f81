"""Where the elements of a tensor are inside the bytes that ``torch.save`` wrote for it.

A saved tensor is a zip archive whose records are stored as they are::

    header  archive/data.pkl    class of the storage, shape, strides
    header  archive/...         versions, byte order
    header  archive/data/0      the elements, contiguous          <- read straight into the memory of a tensor
    header  archive/...
    directory of the archive
"""

from __future__ import annotations

import struct
import sys
from collections import OrderedDict
from dataclasses import dataclass
from math import prod
from pickle import UnpicklingError
from typing import Any

import torch

from fairshard.checkpoint.metadata_pickle import size_of
from fairshard.checkpoint.pickle_limits import Budget, Make, Names
from fairshard.checkpoint.plain_pickle import read_pickle
from fairshard.checkpoint.tensor_storages import STORAGES

HEAD_NBYTES = 2048
"""The elements of a tensor begin before this byte of what was saved (at byte 704, in torch 2.13)."""

_HEADER = struct.Struct("<4s4xH16xHH")  # signature, compression, lengths of the name and of what follows it
_SIGNATURE, _AFTER_DATA = b"PK\x03\x04", b"PK\x07\x08"
_PICKLE, _ELEMENTS = b"archive/data.pkl", b"archive/data/0"


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

    Then `read_object` must read it: a storage larger than the tensor, other strides, a subclass, another byte order, a
    later format.
    """
    start = _record(head, _ELEMENTS)
    described = _record(head, _PICKLE)
    if start is None or described is None or b"little" not in head or sys.byteorder != "little":
        return None
    try:
        found = read_pickle(head, _NAMES, start=described).value
    except UnpicklingError:  # the general reader reports what is wrong with it
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


def _described(args: tuple[Any, ...], budget: Budget) -> _Described:
    """The description of a tensor in a pickle.

    Raises:
        UnpicklingError: the tensor is not all of its storage, in order.
    """
    (dtype, numel), offset, shape, strides, *_ = args
    expected, step = [], 1
    for size in reversed(size_of((shape,), budget)):
        expected.append(step)
        step *= size
    if offset or step != numel or not numel or strides != tuple(reversed(expected)):
        raise UnpicklingError("the storage is not the tensor")
    return _Described(dtype, shape)


def _stored(pid: tuple[Any, ...], budget: Budget) -> tuple[torch.dtype, int]:
    """A storage, as its dtype and its number of elements."""
    _, dtype, key, _, numel = pid
    if key != "0" or type(dtype) is not torch.dtype or type(numel) is not int or dtype not in _IN_PLACE:
        raise UnpicklingError("not the one storage of a tensor")
    return dtype, numel


_IN_PLACE = frozenset(STORAGES.values()) - {torch.complex64, torch.complex128, torch.qint8, torch.quint8, torch.qint32}
_CALLS: dict[tuple[str, str], Make] = {
    ("torch._utils", "_rebuild_tensor_v2"): _described,
    ("collections", "OrderedDict"): lambda args, budget: OrderedDict(),
}
_NAMES = Names("a plain tensor", STORAGES, _CALLS, stored=_stored)
