"""The storages of tensors in a file of ``torch.save``: memory that the file has, not memory that it claims."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable, Sequence
from math import prod
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from fairshard.checkpoint.archive import Record
from fairshard.checkpoint.metadata_pickle import size_of
from fairshard.checkpoint.pickle_limits import LIMITS, Budget

_MAX_COPIES = 8
_MAX_EXTRA_NBYTES = 1 << 26
_NO_BUDGET = Budget(LIMITS, 0)

STORAGES: dict[tuple[str, str], torch.dtype] = {
    ("torch", f"{name}Storage"): getattr(torch, dtype)
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
"""The dtype of each class of storage, by the name in a pickle."""


class Storages:
    """The storages of a file; tensors of all of them may have at most a few times its bytes.

    ``find`` gives the record of a key; it is None for the old format, where storages come after what names them: these
    get memory at once, and `fill` reads them.
    """

    def __init__(self, data: memoryview, find: Callable[[str], Record] | None) -> None:
        self._data = data
        self._find = find
        self._known: dict[str, Storage] = {}
        self._left = _MAX_COPIES * len(data) + _MAX_EXTRA_NBYTES

    def at(self, dtype: torch.dtype, key: str, numel: int) -> Storage:
        """The storage ``key``, of ``numel`` elements.

        Raises:
            UnpicklingError: the file has less of it.
        """
        if type(key) is not str or type(dtype) is not torch.dtype or type(numel) is not int or numel < 0:
            raise UnpicklingError("a storage is not described as torch does")
        nbytes = numel * dtype.itemsize
        if key not in self._known:
            record = Record(0, len(self._data)) if self._find is None else self._find(key)
            if record.stop - record.start < nbytes:
                raise UnpicklingError(f"it has {record.stop - record.start:,} of the {nbytes:,} bytes of a tensor")
            self._known[key] = Storage(self, dtype, nbytes, self._memory(record.start, nbytes, dtype.itemsize))
        found = self._known[key]
        if nbytes > found.nbytes:
            raise UnpicklingError("two tensors say different sizes of their storage")
        return found if found.dtype == dtype else Storage(self, dtype, found.nbytes, found.memory)

    def fill(self, keys: Sequence[str], start: int) -> None:
        """Read all storages of the old format: in the order of ``keys``, each after its number of elements.

        Raises:
            UnpicklingError: they are not there.
        """
        if sorted(map(str, keys)) != sorted(self._known):
            raise UnpicklingError("its storages are not those of its tensors")
        for key in keys:
            storage = self._known[key]
            (numel,) = struct.unpack_from("<q", self._data, start)
            start += 8
            if numel * storage.dtype.itemsize != storage.nbytes or start + storage.nbytes > len(self._data):
                raise UnpicklingError("its storages are damaged, or end too early")
            if storage.nbytes:
                whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage.memory)
                whole.copy_(self._view(start, storage.nbytes))
            start += storage.nbytes

    def use(self, nbytes: int) -> None:
        """Count the bytes of a tensor: views of one storage, and expanded ones, have more than the file.

        Raises:
            UnpicklingError: there are too many.
        """
        self._left -= nbytes
        if self._left < 0:
            raise UnpicklingError("its tensors have far more bytes than it")

    def _memory(self, start: int, nbytes: int, itemsize: int) -> torch.UntypedStorage:
        if self._find is None or not nbytes:
            self.use(nbytes)
            return torch.UntypedStorage(nbytes)
        found = self._view(start, nbytes)
        if found.data_ptr() % itemsize:
            self.use(nbytes)
            found = found.clone()
        return found.untyped_storage()

    def _view(self, start: int, nbytes: int) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a buffer that cannot be written, although these are not
            return torch.frombuffer(self._data, dtype=torch.uint8, count=nbytes, offset=start)


class Storage:
    """One storage."""

    def __init__(self, owner: Storages, dtype: torch.dtype, nbytes: int, memory: torch.UntypedStorage) -> None:
        self.owner = owner
        self.dtype = dtype
        self.nbytes = nbytes
        self.memory = memory

    def tensor(self, dtype: torch.dtype, offset: Any, size: Any, strides: Any) -> Tensor:
        """A view.

        Raises:
            UnpicklingError: it is not inside.
        """
        shape, steps = size_of((tuple(size),), _NO_BUDGET), size_of((tuple(strides),), _NO_BUDGET)
        (begin,) = size_of(((offset,),), _NO_BUDGET)
        if len(shape) != len(steps):
            raise UnpicklingError("a tensor has another number of strides than of dimensions")
        numel = prod(shape)
        last = begin + sum((length - 1) * step for length, step in zip(shape, steps, strict=True))
        end = last + 1 if numel else begin
        if end * dtype.itemsize > self.nbytes:
            raise UnpicklingError(f"a tensor of shape {tuple(shape)} is larger than its storage")
        self.owner.use(numel * dtype.itemsize)
        return torch.empty(0, dtype=dtype, device="cpu").set_(self.memory, begin, shape, steps)
