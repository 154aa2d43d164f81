"""The pickle of ``.metadata``, DCP's list of a checkpoint's entries and where they are: what it may contain.

Each class is filled by a function that checks its attributes, so metadata that were read have the declared types
throughout. Attributes that a later torch adds are dropped.
"""

from __future__ import annotations

import pathlib
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from pickle import UnpicklingError
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from fairshard.checkpoint.pickle_limits import LIMITS, Budget, Limits, Make, Names
from fairshard.checkpoint.plain_pickle import read_pickle

MARK = "fairshard"
"""Our mark in ``Metadata.storage_meta.modules``: these metadata belong to a folder with a manifest."""

_MAX_DIMS = 64
_MAX_PATH_LENGTH = 4096
_MAX_TRANSFORMS = 16
_MAX_LOST = 1000
_PER_LEVEL = 64  # bytes of the budget, which also bounds what a walk over shared paths takes


def read_metadata(data: bytes, limits: Limits = LIMITS) -> Metadata:
    """Read the bytes of a ``.metadata`` file.

    Raises:
        UnpicklingError: they are not metadata, are damaged, or exceed ``limits``.
        ValueError: the entries do not lie beside each other in files of the folder.
    """
    found = read_pickle(data, _NAMES, limits).value
    if type(found) is not Metadata:
        raise UnpicklingError(f"it is {type(found).__name__}")
    _check_places(found.storage_data)
    return found


def is_marked(found: Metadata) -> bool:
    """Whether fairshard wrote these metadata, beside a manifest."""
    return found.storage_meta is not None and MARK in getattr(found.storage_meta, "modules", ())


def size_of(args: tuple[Any, ...], budget: Budget) -> torch.Size:
    """``torch.Size(*args)``, of at most 64 numbers."""
    (sizes,) = args
    if type(sizes) is not tuple or len(sizes) > _MAX_DIMS:
        raise UnpicklingError(f"a shape is {type(sizes).__name__}, or has more than {_MAX_DIMS} dimensions")
    for size in sizes:
        if type(size) is not int or not 0 <= size < 1 << 63:
            raise UnpicklingError(f"a shape is {sizes!r:.200}")
    return _Size(sizes)


def layout_of(args: tuple[Any, ...], budget: Budget) -> torch.layout:
    """The layout of a name. Not torch's own function, because that is a function whose attributes can be set."""
    (name,) = args
    return _LAYOUTS[name]


_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
DTYPES = {("torch", name): dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}


def _instance(cls: type) -> Make:
    new: Callable[[type], Any] = OrderedDict.__new__ if cls is OrderedDict else object.__new__

    def make(args: tuple[Any, ...], budget: Budget) -> Any:
        if args:
            raise UnpicklingError(f"{cls.__name__} has arguments")
        return new(cls)

    return make


def _is(value: Any, *kinds: type) -> Any:
    """``value``, which must be of one of ``kinds``, exactly; where there are millions, callers look first."""
    if type(value) not in kinds:
        raise UnpicklingError(f"it has a {type(value).__name__} in the place of a {kinds[0].__name__}")
    return value


def _check_path(path: str) -> None:
    if len(path) > _MAX_PATH_LENGTH or path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise UnpicklingError(f"it points outside its folder, to {path!r:.200}")


_NONE, _Size = type(None), torch.Size
_SIZE_OR_NONE, _INT_OR_NONE = frozenset({_Size, _NONE}), frozenset({int, _NONE})


def _build_metadata(made: Metadata, state: Any, budget: Budget) -> None:
    entries = _is(state["state_dict_metadata"], dict, OrderedDict)
    for key, entry in entries.items():
        _is(key, str)
        _is(entry, metadata.TensorStorageMetadata, metadata.BytesStorageMetadata)
    places = _is(state["storage_data"], dict, OrderedDict)
    for wrong in set(map(type, places)) - {MetadataIndex} or set(map(type, places.values())) - {_StorageInfo}:
        raise UnpicklingError(f"it has a {wrong.__name__} in the place of a place in a file")
    num_chunks = sum(len(each.chunks) for each in entries.values() if type(each) is metadata.TensorStorageMetadata)
    if num_chunks > 2 * len(places) + _MAX_LOST:
        raise UnpicklingError(f"it has {num_chunks:,} pieces of tensors, but only {len(places):,} places")
    made.state_dict_metadata = entries
    made.storage_data = places
    made.planner_data = _planned(state.get("planner_data"), budget)
    made.storage_meta = _is(state.get("storage_meta"), metadata.StorageMeta, _NONE)
    made.version = _is(state.get("version"), str, _NONE)


def _planned(found: Any, budget: Budget) -> dict[str, tuple[Any, ...]] | None:
    """The paths of keys in the nested dict that was saved; other planners' data are dropped."""
    if type(found) not in (dict, OrderedDict):
        return None
    paths = {key: path for key, path in found.items() if type(key) is str and type(path) is tuple}
    for path in paths.values():
        budget.take(_PER_LEVEL * len(path))
        for level in path:
            _is(level, str, int)
    return paths


def _build_tensor(made: metadata.TensorStorageMetadata, state: Any, budget: Budget) -> None:
    made.properties = _is(state["properties"], metadata.TensorProperties)
    made.size = _is(state["size"], torch.Size)
    made.chunks = _is(state["chunks"], list)
    budget.use_once(made.chunks)
    for chunk in made.chunks:
        if type(chunk) is not metadata.ChunkStorageMetadata:
            _is(chunk, metadata.ChunkStorageMetadata)


def _build_chunk(made: metadata.ChunkStorageMetadata, state: Any, budget: Budget) -> None:
    offsets, sizes = state["offsets"], state["sizes"]
    if type(offsets) is not _Size or type(sizes) is not _Size:
        raise UnpicklingError("a piece of a tensor has other offsets or sizes than shapes")
    made.offsets, made.sizes = offsets, sizes


def _build_properties(made: metadata.TensorProperties, state: Any, budget: Budget) -> None:
    dtype, layout, requires_grad, memory_format, pin_memory = state[:5]  # torch 2.15 adds the strides; not needed here
    if len(state) > 6:
        raise UnpicklingError(f"the properties of a tensor have {len(state)} entries")
    _is(dtype, torch.dtype)
    _is(layout, torch.layout)
    _is(memory_format, metadata._MEM_FORMAT_ENCODING)
    made.__setstate__((dtype, layout, _is(requires_grad, bool), memory_format, _is(pin_memory, bool)))


def _build_index(made: MetadataIndex, state: Any, budget: Budget) -> None:
    fqn, offset, index = state["fqn"], state.get("offset"), state.get("index")
    if type(fqn) is not str or type(offset) not in _SIZE_OR_NONE or type(index) not in _INT_OR_NONE:
        raise UnpicklingError(f"the index {fqn!r:.40}, {offset!r:.40}, {index!r:.40} is not of an entry")
    attributes = vars(made)  # the class is frozen
    attributes["fqn"], attributes["offset"], attributes["index"] = fqn, offset, index


def _build_place(made: _StorageInfo, state: Any, budget: Budget) -> None:
    path, offset, length = state["relative_path"], state["offset"], state["length"]
    _is(path, str)
    if len(path) > _MAX_PATH_LENGTH or "/" in path or "\0" in path or path == "..":
        _check_path(path)
    if type(offset) is not int or not 0 <= offset < 1 << 63 or type(length) is not int or not 0 <= length < 1 << 63:
        raise UnpicklingError(f"{offset!r:.40} or {length!r:.40} is no place in a file")
    made.relative_path, made.offset, made.length = path, offset, length
    transforms = state.get("transform_descriptors")
    if transforms is not None:
        if len(_is(transforms, list, tuple)) > _MAX_TRANSFORMS:
            raise UnpicklingError(f"an entry has {len(transforms):,} transforms")
        transforms = [_is(name, str) for name in transforms]
    made.transform_descriptors = transforms


def _build_origin(made: metadata.StorageMeta, state: Any, budget: Budget) -> None:
    made.checkpoint_id = _is(state.get("checkpoint_id"), str, pathlib.PosixPath, pathlib.PurePosixPath, _NONE)
    made.save_id = _is(state.get("save_id"), str, _NONE)
    made.load_id = _is(state.get("load_id"), str, _NONE)
    made.modules = [_is(name, str) for name in _is(state.get("modules", []), list)]


def _path(args: tuple[Any, ...], budget: Budget) -> pathlib.PurePosixPath:
    if len(args) > _MAX_PATH_LENGTH or sum(len(_is(part, str)) for part in args) > _MAX_PATH_LENGTH:
        raise UnpicklingError(f"a path has more than {_MAX_PATH_LENGTH} characters")
    return pathlib.PurePosixPath(*args)


def _memory_format(args: tuple[Any, ...], budget: Budget) -> metadata._MEM_FORMAT_ENCODING:
    (number,) = args
    return metadata._MEM_FORMAT_ENCODING(_is(number, int))


def _check_places(places: dict[MetadataIndex, _StorageInfo]) -> None:
    """Check that no two entries share bytes of a file: a small file could otherwise fill any memory.

    Raises:
        ValueError: two do.
    """
    spans = sorted((place.relative_path, place.offset, place.length) for place in places.values() if place.length)
    for (path, begin, nbytes), (other, following, _) in pairwise(spans):
        if path == other and begin + nbytes > following:
            raise ValueError(f"two of its entries share bytes of {path}")


_BUILDS: dict[type, Callable[[Any, Any, Budget], None]] = {
    metadata.Metadata: _build_metadata,
    metadata.TensorStorageMetadata: _build_tensor,
    metadata.ChunkStorageMetadata: _build_chunk,
    metadata.TensorProperties: _build_properties,
    metadata.MetadataIndex: _build_index,
    metadata.StorageMeta: _build_origin,
    _StorageInfo: _build_place,
}
_PATHS = [("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"), ("pathlib", "PurePosixPath")]
_NAMES = Names(
    "metadata",
    values=DTYPES,
    calls={
        **{(cls.__module__, cls.__qualname__): _instance(cls) for cls in (*_BUILDS, metadata.BytesStorageMetadata)},
        (metadata.Metadata.__module__, "_MEM_FORMAT_ENCODING"): _memory_format,
        ("torch.serialization", "_get_layout"): layout_of,
        ("torch", "Size"): size_of,
        ("torch._C", "Size"): size_of,
        ("collections", "OrderedDict"): _instance(OrderedDict),
        **dict.fromkeys([*_PATHS, ("pathlib._local", "PurePosixPath")], _path),
    },
    builds=_BUILDS,
    stateful=frozenset(_BUILDS),
    keys=frozenset({MetadataIndex}),
)
