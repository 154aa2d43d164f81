"""``.metadata``, DCP's list of a checkpoint's entries and where they are: made from a pickle that was read as data.

Each object is made by a function that checks what its bag holds, so metadata that were read have the declared types
throughout. Attributes that are not needed, or that a later torch adds, are dropped.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from pickle import UnpicklingError
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from fairshard.checkpoint.bags import Bag, Name, read_pickle

MARK = "fairshard"
"""Our mark in ``Metadata.storage_meta.modules``: these metadata belong to a folder with a manifest."""
DTYPES = {f"torch.{name}": dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
"""Every dtype, by the path of its name."""
LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
"""Every layout, by what torch writes."""

_MAX_DIMS = 64
_MAX_PATH_LENGTH = 4096
_MAX_LEVELS = 1000
_MAX_LOST = 1000
_MAX_EQUAL_HASHES = 16
_MAX_CHUNKS = 1 << 32  # limited in all, before any is made

Make = Callable[[Any], Any]
"""Checks a value of a pickle, and makes an object of it."""


def read_metadata(data: bytes) -> Metadata:
    """Read the bytes of a ``.metadata`` file.

    Raises:
        Exception: they are not metadata, or are damaged; of any kind.
    """
    state = _bag(read_pickle(io.BytesIO(data))[0], _path(Metadata)).state
    entries, places = _items(state["state_dict_metadata"]), _items(state["storage_data"])
    num_chunks = sum(len(entry.state["chunks"]) for entry in entries.values() if _is_tensor(entry))
    if num_chunks > 2 * len(places) + _MAX_LOST:  # the same ones again and again
        raise UnpicklingError(f"it has {num_chunks:,} pieces of tensors, but only {len(places):,} places")
    values = [_place(place) for place in places.values()]
    indices = [_index(index) for index in places]
    if max(Counter(map(hash, indices)).values(), default=0) > _MAX_EQUAL_HASHES:
        raise UnpicklingError("too many of its places have one hash")
    paths = state.get("planner_data")
    made = object.__new__(Metadata)  # other versions of torch have other attributes
    made.state_dict_metadata = {_text(key): _entry(entry) for key, entry in entries.items()}
    made.storage_data = dict(zip(indices, values, strict=True))
    made.planner_data = None  # that of another planner
    if type(paths) is dict:
        made.planner_data = {_text(key): tuple(_levels(path)) for key, path in paths.items()}
    made.storage_meta = _optional(_origin)(state.get("storage_meta"))
    made.version = _optional(_text)(state.get("version"))
    _check_places(made.storage_data.values())
    return made


def is_marked(found: Metadata) -> bool:
    """Whether fairshard wrote these metadata, beside a manifest."""
    return MARK in (getattr(found.storage_meta, "modules", None) or ())


def shape_of(sizes: Any) -> torch.Size:
    """``torch.Size(sizes)``, of at most 64 numbers.

    Raises:
        UnpicklingError: they are not the sizes of a tensor.
    """
    return torch.Size(_numbers(sizes))


def dtype_of(name: Any) -> torch.dtype:
    """The dtype of a name."""
    if type(name) is not Name or name.path not in DTYPES:
        raise UnpicklingError(f"it has {_named(name)} in the place of a dtype")
    return DTYPES[name.path]


# ---- what functions that make objects are made of


def _one_of(*kinds: type) -> Make:
    """Of a value that has one of ``kinds``, exactly."""

    def make(value: Any) -> Any:
        if type(value) not in kinds:
            raise UnpicklingError(f"it has {_named(value)} in the place of a {kinds[0].__name__}")
        return value

    return make


def _many(make: Make, most: int) -> Make:
    """Of a list or tuple of at most so many values."""

    def make_all(values: Any) -> Any:
        if type(values) not in (list, tuple) or len(values) > most:
            raise UnpicklingError(f"it has {_named(values)} in the place of at most {most} values")
        return [make(value) for value in values]

    return make_all


def _optional(make: Make) -> Make:
    """Of None or a value."""
    return lambda value: None if value is None else make(value)


def _object(kind: type, **makes: Make) -> Make:
    """Of a bag of the attributes of a ``kind``."""
    path = _path(kind)

    def make(bag: Any) -> Any:
        state = _bag(bag, path).state or {}
        made: Any = object.__new__(kind)
        vars(made).update({name: make_value(state.get(name)) for name, make_value in makes.items()})
        return made

    return make


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _bag(bag: Any, *paths: str) -> Bag:
    """The bag of an object whose class has one of ``paths``."""
    if type(bag) is not Bag or bag.path not in paths:
        raise UnpicklingError(f"it has {_named(bag)} in the place of {paths[0]}")
    return bag


def _named(value: Any) -> str:
    return value.path[:200] if isinstance(value, (Name, Bag)) else f"a {type(value).__name__}"


def _items(found: Any) -> dict[Any, Any]:
    """The items of a dict or an OrderedDict."""
    return found if type(found) is dict else _bag(found, "collections.OrderedDict").items


# ---- the objects


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise UnpicklingError(f"it has {_named(value)} in the place of a size or a position")
    return value


def _path_inside(path: Any) -> str:
    if len(_text(path)) > _MAX_PATH_LENGTH or path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise UnpicklingError(f"it points outside its folder, to {path!r:.200}")
    return str(path)


def _size(bag: Any) -> torch.Size:
    """A shape; ``torch.Size`` is named by two modules."""
    (sizes,) = _bag(bag, "torch.Size", "torch._C.Size").args
    return shape_of(sizes)


def _properties(bag: Any) -> dcp.TensorProperties:
    state = _bag(bag, _PROPERTIES).state
    if len(state) not in (5, 6):  # torch 2.15 adds the strides; not needed here
        raise UnpicklingError(f"the properties of a tensor have {len(state)} entries")
    dtype, layout, requires_grad, memory_format, pin_memory = state[:5]
    (layout_name,) = _bag(layout, "torch.serialization._get_layout").args
    (number,) = _bag(memory_format, _ENCODING).args
    encoding = dcp._MEM_FORMAT_ENCODING(number)
    made = object.__new__(dcp.TensorProperties)
    made.__setstate__((dtype_of(dtype), LAYOUTS[layout_name], _flag(requires_grad), encoding, _flag(pin_memory)))
    return made


def _entry(bag: Any) -> Any:
    return _tensor(bag) if _is_tensor(bag) else _bytes(bag)


def _is_tensor(bag: Any) -> bool:
    return type(bag) is Bag and bag.path == _TENSOR


_TENSOR, _PROPERTIES, _ENCODING = map(
    _path, (dcp.TensorStorageMetadata, dcp.TensorProperties, dcp._MEM_FORMAT_ENCODING)
)
_text, _flag = _one_of(str), _one_of(bool)
_numbers = _many(_number, _MAX_DIMS)
_levels = _many(_one_of(str, int), _MAX_LEVELS)
_chunk = _object(dcp.ChunkStorageMetadata, offsets=_size, sizes=_size)
_tensor = _object(dcp.TensorStorageMetadata, properties=_properties, size=_size, chunks=_many(_chunk, _MAX_CHUNKS))
_bytes = _object(dcp.BytesStorageMetadata)
_index = _object(dcp.MetadataIndex, fqn=_text, offset=_optional(_size), index=_optional(_number))
_place = _object(
    _StorageInfo,
    relative_path=_path_inside,
    offset=_number,
    length=_number,
    transform_descriptors=_optional(_many(_text, most=16)),  # torch 2.6 has none
)
_origin = _object(
    dcp.StorageMeta,
    save_id=_optional(_text),
    load_id=_optional(_text),
    modules=_optional(_many(_text, _MAX_LEVELS)),
)


def _check_places(places: Iterable[_StorageInfo]) -> None:
    """Check that no two entries share bytes of a file: a small file could otherwise fill any memory.

    Raises:
        ValueError: two do.
    """
    spans = sorted((place.relative_path, place.offset, place.length) for place in places if place.length)
    for (path, begin, nbytes), (other, following, _) in pairwise(spans):
        if path == other and begin + nbytes > following:
            raise ValueError(f"two of its entries share bytes of {path}")
