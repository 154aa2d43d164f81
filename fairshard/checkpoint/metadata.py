"""``.metadata``, DCP's list of a checkpoint's entries and where they are: made from a pickle that was read as data.

Each object is made by a function that checks what its bag holds, so metadata that were read have the declared types
throughout. Attributes that a later torch adds are dropped.
"""

from __future__ import annotations

import io
import pathlib
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pickle import UnpicklingError
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from fairshard.checkpoint.bags import Bag, Name, read_pickle

MARK = "fairshard"
"""Our mark in ``Metadata.storage_meta.modules``: these metadata belong to a folder with a manifest."""
DTYPES = {f"torch.{name}": dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
"""Every dtype, by the path of its name."""

_MAX_DIMS = 64
_MAX_PATH_LENGTH = 4096
_MAX_LEVELS = 1000
_MAX_TRANSFORMS = 16
_MAX_LOST = 1000
_MAX_EQUAL_HASHES = 16
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_PATHS = {f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")}


def read_metadata(data: bytes) -> Metadata:
    """Read the bytes of a ``.metadata`` file.

    Raises:
        Exception: they are not metadata, or are damaged; of any kind.
    """
    state = _state_of(read_pickle(io.BytesIO(data)).value, Metadata)
    entries, places = _items_of(state["state_dict_metadata"]), _items_of(state["storage_data"])
    num_chunks = sum(len(_of(each.state["chunks"], list)) for each in entries.values() if _is_tensor(each))
    if num_chunks > 2 * len(places) + _MAX_LOST:
        raise UnpicklingError(f"it has {num_chunks:,} pieces of tensors, but only {len(places):,} places")
    values = [_place(place) for place in places.values()]
    indices = [_index(index) for index in places]
    if max(Counter(map(hash, indices)).values(), default=0) > _MAX_EQUAL_HASHES:
        raise UnpicklingError("too many of its places have one hash")
    made = object.__new__(Metadata)  # other versions of torch have other attributes
    made.state_dict_metadata = {_of(key, str): _entry(entry) for key, entry in entries.items()}
    made.storage_data = dict(zip(indices, values, strict=True))
    made.planner_data = _paths_in(state.get("planner_data"))
    made.storage_meta = _origin(state.get("storage_meta"))
    made.version = _of(state.get("version"), str, type(None))
    _check_places(made.storage_data.values())
    return made


def is_marked(found: Metadata) -> bool:
    """Whether fairshard wrote these metadata, beside a manifest."""
    return found.storage_meta is not None and MARK in getattr(found.storage_meta, "modules", ())


def shape_of(sizes: Any) -> torch.Size:
    """``torch.Size(sizes)``, of at most 64 numbers.

    Raises:
        UnpicklingError: they are not the sizes of a tensor.
    """
    if type(sizes) is not tuple or len(sizes) > _MAX_DIMS:
        raise UnpicklingError(f"a shape is {type(sizes).__name__}, or has more than {_MAX_DIMS} dimensions")
    for size in sizes:
        if type(size) is not int or not 0 <= size < 1 << 63:
            raise UnpicklingError(f"a shape has the size {_named(size)}")
    return torch.Size(sizes)


def dtype_of(name: Any) -> torch.dtype:
    """The dtype of a name."""
    if type(name) is not Name or name.path not in DTYPES:
        raise UnpicklingError(f"it has {_named(name)} in the place of a dtype")
    return DTYPES[name.path]


def layout_of(name: Any) -> torch.layout:
    """The layout that torch writes as ``name``."""
    return _LAYOUTS[name]


# ---- private


def _entry(bag: Any) -> Any:
    if not _is_tensor(bag):
        return _of_class(bag, dcp.BytesStorageMetadata) and dcp.BytesStorageMetadata()
    state = _state_of(bag, dcp.TensorStorageMetadata)
    chunks = [_chunk(chunk) for chunk in state["chunks"]]
    return dcp.TensorStorageMetadata(_properties(state["properties"]), _size(state["size"]), chunks)


def _is_tensor(bag: Any) -> bool:
    return type(bag) is Bag and bag.path == _path(dcp.TensorStorageMetadata)


def _chunk(bag: Any) -> dcp.ChunkStorageMetadata:
    state = _state_of(bag, dcp.ChunkStorageMetadata)
    return dcp.ChunkStorageMetadata(_size(state["offsets"]), _size(state["sizes"]))


def _properties(bag: Any) -> dcp.TensorProperties:
    state = _of_class(bag, dcp.TensorProperties).state
    if len(_of(state, tuple)) not in (5, 6):  # torch 2.15 adds the strides; not needed here
        raise UnpicklingError(f"the properties of a tensor have {len(state)} entries")
    dtype, layout, requires_grad, memory_format, pin_memory = state[:5]
    (layout_name,) = _of_path(layout, "torch.serialization._get_layout").args
    (number,) = _of_class(memory_format, dcp._MEM_FORMAT_ENCODING).args
    encoding = dcp._MEM_FORMAT_ENCODING(_of(number, int))
    made = object.__new__(dcp.TensorProperties)
    flags = _of(requires_grad, bool), _of(pin_memory, bool)
    made.__setstate__((dtype_of(dtype), layout_of(layout_name), flags[0], encoding, flags[1]))
    return made


def _index(bag: Any) -> MetadataIndex:
    state = _state_of(bag, MetadataIndex)
    offset = state.get("offset")
    index = _of(state.get("index"), int, type(None))
    return MetadataIndex(_of(state["fqn"], str), None if offset is None else _size(offset), index)


def _place(bag: Any) -> _StorageInfo:
    state = _state_of(bag, _StorageInfo)
    path, offset, length = _of(state["relative_path"], str), _of(state["offset"], int), _of(state["length"], int)
    if len(path) > _MAX_PATH_LENGTH or path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise UnpicklingError(f"it points outside its folder, to {path!r:.200}")
    if not (0 <= offset < 1 << 63 and 0 <= length < 1 << 63):
        raise UnpicklingError("it has a place that is in no file")
    made = _StorageInfo(path, offset, length)
    made.transform_descriptors = _transforms(state.get("transform_descriptors"))  # torch 2.6 has none
    return made


def _transforms(found: Any) -> list[str] | None:
    if found is None:
        return None
    if len(_of(found, list, tuple)) > _MAX_TRANSFORMS:
        raise UnpicklingError(f"an entry has {len(found):,} transforms")
    return [_of(name, str) for name in found]


def _origin(bag: Any) -> dcp.StorageMeta | None:
    if bag is None:
        return None
    state = _state_of(bag, dcp.StorageMeta)
    made = object.__new__(dcp.StorageMeta)
    folder = state.get("checkpoint_id")
    if type(folder) is Bag and folder.path in _PATHS:
        folder = str(pathlib.PurePosixPath(*(_of(part, str) for part in folder.args)))
    made.checkpoint_id = _of(folder, str, type(None))
    made.save_id = _of(state.get("save_id"), str, type(None))
    made.load_id = _of(state.get("load_id"), str, type(None))
    made.modules = [_of(name, str) for name in _of(state.get("modules", []), list)]
    return made


def _paths_in(found: Any) -> dict[str, tuple[Any, ...]] | None:
    """The paths of keys in the nested dict that was saved; other planners' data are dropped."""
    if type(found) is not dict:
        return None
    for key, path in found.items():
        _of(key, str)
        if len(_of(path, tuple)) > _MAX_LEVELS:
            raise UnpicklingError(f"the path of an entry has {len(path):,} levels")
        for level in path:
            _of(level, str, int)
    return found


def _size(bag: Any) -> torch.Size:
    """A shape; ``torch.Size`` is named by two modules."""
    if type(bag) is not Bag or bag.path not in ("torch.Size", "torch._C.Size"):
        raise UnpicklingError(f"it has {_named(bag)} in the place of a shape")
    (sizes,) = bag.args
    return shape_of(sizes)


def _items_of(found: Any) -> dict[Any, Any]:
    """The items of a dict or an OrderedDict."""
    is_ordered = type(found) is Bag and found.path == "collections.OrderedDict"
    return found.items if is_ordered else _of(found, dict)  # type: ignore[no-any-return]


def _state_of(bag: Any, kind: type) -> dict[str, Any]:
    """The attributes of an object of class ``kind``."""
    return _of(_of_class(bag, kind).state, dict)  # type: ignore[no-any-return]


def _of_class(bag: Any, kind: type) -> Bag:
    return _of_path(bag, _path(kind))


def _of_path(bag: Any, path: str) -> Bag:
    if type(bag) is not Bag or bag.path != path:
        raise UnpicklingError(f"it has {_named(bag)} in the place of {path}")
    return bag


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _of(value: Any, *kinds: type) -> Any:
    """``value``, which must be of one of ``kinds``, exactly."""
    if type(value) not in kinds:
        raise UnpicklingError(f"it has {_named(value)} in the place of a {kinds[0].__name__}")
    return value


def _named(value: Any) -> str:
    return value.path[:200] if isinstance(value, (Name, Bag)) else f"a {type(value).__name__}"


def _check_places(places: Iterable[_StorageInfo]) -> None:
    """Check that no two entries share bytes of a file: a small file could otherwise fill any memory.

    Raises:
        ValueError: two do.
    """
    spans = sorted((place.relative_path, place.offset, place.length) for place in places if place.length)
    for (path, begin, nbytes), (other, following, _) in pairwise(spans):
        if path == other and begin + nbytes > following:
            raise ValueError(f"two of its entries share bytes of {path}")
