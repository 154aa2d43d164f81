"""Reading checkpoints of torch.distributed.checkpoint without running code from them.

A checkpoint is data. But its ``.metadata`` is a pickle, which torch reads with ``pickle.load``, and its object
entries are pickles, which torch's planner reads with ``weights_only=False``: anyone who can write to the folder can
run code in every rank (measured with torch 2.13). Here the metadata go through an unpickler that allows only the
classes of such metadata, and object entries through ``weights_only=True``, as tensors always do.
"""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import zlib
from collections import Counter, OrderedDict
from dataclasses import replace
from typing import IO, Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as FsspecFileSystem
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.futures import Future

from fairshard.checkpoint.local_file import Cut, Entry, EntryError, can_read, read_entries
from fairshard.checkpoint.manifest import Manifest, check_crc, verify_file
from fairshard.checkpoint.storage import is_remote, storage_of
from fairshard.errors import CheckpointError

METADATA = ".metadata"

_METADATA_CLASSES = (
    metadata.Metadata,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.TensorProperties,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata._MEM_FORMAT_ENCODING,
    _StorageInfo,
    torch.Size,
    OrderedDict,
    pathlib.PosixPath,
    pathlib.PurePosixPath,
)
_ALLOWED: dict[tuple[str, str], Any] = {(cls.__module__, cls.__qualname__): cls for cls in _METADATA_CLASSES}
# Not torch's own function, because a pickle can also set attributes of functions.
_ALLOWED["torch.serialization", "_get_layout"] = {
    str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)
}.__getitem__
_ALLOWED["pathlib", "PosixPath"] = pathlib.PosixPath
_ALLOWED["pathlib._local", "PosixPath"] = pathlib.PosixPath
_ALLOWED["torch._C", "Size"] = torch.Size
_ALLOWED.update({("torch", name): dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)})


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The class ``module.name``, if metadata may contain it.

        Raises:
            UnpicklingError: metadata never contain it.
        """
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which metadata never contain") from None

    def load(self) -> Any:
        """Unpickle the metadata.

        Raises:
            UnpicklingError: the pickle names a class that metadata never contain, or sets attributes of a class, which
                would affect every later load.
        """
        named = [*_METADATA_CLASSES, *metadata._MEM_FORMAT_ENCODING]
        before = [dict(vars(each)) for each in named]
        try:
            return super().load()
        finally:
            changed = [_restore(each, attributes) for each, attributes in zip(named, before, strict=True)]
            if any(changed):
                raise pickle.UnpicklingError("it changes the classes of metadata")


def _restore(named: Any, attributes: dict[str, Any]) -> bool:
    """Restore the attributes of a class or enum member; returns whether any had changed."""
    found = dict(vars(named))
    added = found.keys() - attributes.keys()
    for name in added:
        delattr(named, name)
    changed = [name for name, value in attributes.items() if found.get(name) is not value]
    for name in changed:
        setattr(named, name, attributes[name])
    return bool(added or changed)


class CheckpointReader(FileSystemReader):
    """torch's reader for a local folder or an fsspec URL; its metadata cannot run code.

    Local files are read once, straight into the tensors that want them. ``manifest``, if set before the first read,
    vouches for the files. With ``sums_while_reading`` each of its files is compared with its checksum in `read_data`,
    by the rank that reads most of it; without it, the caller has verified them.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path if not is_remote(path) else ".")
        self._reads_in_place = not is_remote(path) and hasattr(os, "preadv")
        if is_remote(path):
            self.fs: Any = FsspecFileSystem()
            self.path = self.fs.init_path(path)
        self.manifest: Manifest | None = None
        self.sums_while_reading = False
        self._folder = path
        self._storage = storage_of(path)
        self._known: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """The metadata, read once and kept; compared with the checksum of the manifest, if there is one.

        Raises:
            CheckpointError: the file is missing or damaged, or is not metadata.
        """
        if self._known is None:
            path = str(self.fs.concat_path(self.path, METADATA))
            if not self.fs.exists(path):
                raise CheckpointError(f"A checkpoint must have a {METADATA}, but there is no {path}.")
            try:
                with self.fs.create_stream(path, "rb") as file:
                    data = file.read()
                vouched = None if self.manifest is None else self.manifest.files.get(METADATA)
                if vouched is not None:
                    check_crc(path, zlib.crc32(data), vouched)
                self._known = _checked(_MetadataUnpickler(io.BytesIO(data)).load())
            except CheckpointError:
                raise
            except Exception as error:  # damaged pickles can raise anything
                raise CheckpointError(
                    f"{path} must be metadata of a checkpoint, but is not: {error}. It is damaged, or made to run "
                    "code. Use another checkpoint."
                ) from error
        return self._known

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Give each file of the manifest to the rank that reads most of it, which compares it with its checksum."""
        if not self.sums_while_reading or self.manifest is None:
            return plans
        reads = [self._nbytes_read(plan) for plan in plans]
        shares: list[list[str]] = [[] for _ in plans]
        load = [sum(own.values()) for own in reads]
        for name, entry in sorted(self.manifest.files.items()):
            if name != METADATA:  # every rank reads and checks it
                rank = max(range(len(plans)), key=lambda rank: (reads[rank].get(name, 0), -load[rank], -rank))
                shares[rank].append(name)
                load[rank] += entry.nbytes - reads[rank].get(name, 0)
        return [replace(plan, storage_data=share) for plan, share in zip(plans, shares, strict=True)]

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Read the entries of ``plan`` file by file, and verify the files that `prepare_global_plan` gave this rank.

        Raises:
            CheckpointError: a file is missing or damaged, or holds an entry that could run code.
        """
        by_file: dict[str, list[ReadItem]] = {name: [] for name in plan.storage_data or ()}
        own = set(by_file)
        for item in plan.items:
            place = self.storage_data.get(item.storage_index)
            if place is None:
                raise CheckpointError(
                    f"{self.fs.concat_path(self.path, METADATA)} must say where all of `{item.storage_index.fqn}` is, "
                    "but does not. It is damaged. Use another checkpoint."
                )
            by_file.setdefault(place.relative_path, []).append(item)
        for name, items in by_file.items():
            try:
                self._read_file(name, items, planner, name in own)
            except CheckpointError:
                raise
            except Exception as error:
                if self.manifest is not None and name in self.manifest.files:  # damaged bytes are the likely cause
                    verify_file(self._storage, self._folder, name, self.manifest.files[name])
                path = self.fs.concat_path(self.path, name)
                if isinstance(error, OSError):
                    raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error
                entry = self._unreadable(items, planner, error)
                cause = (isinstance(error, EntryError) and error.__cause__) or error
                raise CheckpointError(
                    f"{path} must hold `{entry}`, but it cannot be read from there: {first_line(cause)}"
                ) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(self, name: str, items: list[ReadItem], planner: Any, sums: bool) -> None:
        places = [self.storage_data[item.storage_index] for item in items]
        has_transforms = any(getattr(place, "transform_descriptors", None) for place in places)
        path = os.path.join(self.path, name)
        entries: dict[MetadataIndex, Entry] = {}
        nbytes = 0
        if self._reads_in_place and not has_transforms:
            entries, nbytes = _entries(items, places, planner), os.path.getsize(path)
        if not nbytes or not can_read(list(entries.values()), nbytes):
            if sums:
                assert self.manifest is not None
                verify_file(self._storage, self._folder, name, self.manifest.files[name])
            if items:
                super().read_data(LoadPlan(items), planner).wait()
            return
        crc = read_entries(path, nbytes, list(entries.values()), sums)
        if crc is not None:
            assert self.manifest is not None
            check_crc(path, crc, self.manifest.files[name])
        for item in items:
            if item.type is LoadItemType.BYTE_IO:
                _load_object(item, entries[item.storage_index], planner)

    def _nbytes_read(self, plan: LoadPlan) -> Counter[str]:
        """Bytes that ``plan`` reads of each file."""
        places = {item.storage_index: self.storage_data.get(item.storage_index) for item in plan.items}
        nbytes: Counter[str] = Counter()
        for place in filter(None, places.values()):
            nbytes[place.relative_path] += place.length
        return nbytes

    def _unreadable(self, items: list[ReadItem], planner: Any, error: Exception) -> str:
        """The first of ``items`` that cannot be read."""
        if isinstance(error, EntryError):
            return error.name
        for item in items:
            try:
                super().read_data(LoadPlan([item]), planner).wait()
            except Exception:  # the caller reports it
                return item.storage_index.fqn
        return items[0].storage_index.fqn


class SafePlanner(DefaultLoadPlanner):
    """torch's planner, except that it reads objects as data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Store an object in the state dict.

        Raises:
            UnpicklingError: the object holds anything but tensors, numbers, strings and containers of them.
        """
        found = load_object(value)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], found)
        else:
            self.state_dict[read_item.dest_index.fqn] = found


def _entries(items: list[ReadItem], places: list[_StorageInfo], planner: Any) -> dict[MetadataIndex, Entry]:
    """The entries of one file that ``items`` read; several items may read parts of one entry."""
    entries: dict[MetadataIndex, Entry] = {}
    for item, place in zip(items, places, strict=True):
        index = item.storage_index
        entry = entries.setdefault(index, Entry(index.fqn, place.offset, place.length))
        if item.type is LoadItemType.BYTE_IO:
            entry.keeps_bytes = True
        else:
            target = planner.resolve_tensor(item).detach()
            entry.cuts.append(Cut(target, item.storage_offsets, item.lengths))
    return entries


def _load_object(item: ReadItem, entry: Entry, planner: Any) -> None:
    """Store an object in the planner's state dict.

    Raises:
        EntryError: it holds anything but plain data.
    """
    try:
        planner.load_bytes(item, io.BytesIO(entry.found))
    except Exception as error:  # damaged bytes can raise anything
        raise EntryError(entry.name) from error


def load_object(file: IO[bytes]) -> Any:
    """Read an object entry as data."""
    return torch.load(file, map_location="cpu", weights_only=True)


def first_line(error: BaseException) -> str:
    """The first line of ``error``'s message, without torch's advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = lines[0].partition(" This is an internal miniz error")[0]
    if text.startswith("Weights only load failed"):  # torch goes on to explain the unsafe way
        cause = next((line for line in lines[1:] if "GLOBAL" in line or "error:" in line), "torch refuses it")
        text = f"it holds more than data: {cause}"
    return text.rstrip(".") + "."


def _checked(found: Any) -> Metadata:
    if not isinstance(found, Metadata) or not isinstance(found.state_dict_metadata, dict):
        raise ValueError(f"it is {type(found).__name__}")
    if not isinstance(found.storage_data, dict):
        raise ValueError("it does not say where entries are")
    for index, place in found.storage_data.items():
        if not isinstance(index, metadata.MetadataIndex) or not isinstance(place, _StorageInfo):
            raise ValueError("it does not say where entries are")
        path = pathlib.PurePosixPath(place.relative_path)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"it points outside its folder, to {place.relative_path}")
    return found
