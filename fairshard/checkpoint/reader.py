"""Reading checkpoints of torch.distributed.checkpoint without running code from them.

A checkpoint is data. But its ``.metadata`` is a pickle, which torch reads with ``pickle.load``, and its object
entries are pickles, which torch's planner reads with ``weights_only=False``: anyone who can write to the folder can
run code in every rank (measured with torch 2.13). Here both go through ``plain_pickle.py``, which runs nothing, and
neither overflows the stack nor fills memory.
"""

from __future__ import annotations

import contextlib
import io
import os
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import IO, Any

from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as FsspecFileSystem
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.futures import Future

from fairshard.checkpoint.local_file import Cut, Entry, EntryError, can_read, part_of, read_entries
from fairshard.checkpoint.manifest import Manifest, check_crc, verify_file
from fairshard.checkpoint.metadata_pickle import is_marked, read_metadata
from fairshard.checkpoint.pickle_limits import LIMITS, Limits
from fairshard.checkpoint.plain_objects import read_object
from fairshard.checkpoint.storage import MANIFEST, Storage, is_remote, open_regular, read_at_most, storage_of
from fairshard.errors import CheckpointError
from fairshard.utils.user_line import level_of_user

METADATA = ".metadata"
MAX_METADATA_NBYTES = 1 << 30

_MAX_OBJECT_GROWTH = 64
_MAX_LINE = 400  # characters: a damaged file can have a name of any length
_MAX_EXTRA_NBYTES = 1 << 24


class CheckpointReader(FileSystemReader):
    """torch's reader for a local folder or an fsspec URL; its metadata cannot run code.

    Local files are read once, straight into the tensors that want them. ``manifest``, if set before the first read,
    vouches for the files. With ``sums_while_reading`` each of its files is compared with its checksum in `read_data`,
    by the rank that reads most of it; without it, the caller has verified them. ``limits`` are those of metadata.
    """

    def __init__(self, path: str, limits: Limits = LIMITS, max_metadata_nbytes: int = MAX_METADATA_NBYTES) -> None:
        self._storage = storage_of(path)  # first: it says which package a protocol needs
        super().__init__(path if not is_remote(path) else ".")
        self._reads_in_place = not is_remote(path) and hasattr(os, "preadv")
        if is_remote(path):
            self.fs: Any = _RemoteFiles(self._storage)
            self.path = self.fs.init_path(path)
        else:
            self.fs = _RegularFiles()
        self.manifest: Manifest | None = None
        self.sums_while_reading = False
        self._folder = path
        self._limits = limits
        self._max_metadata_nbytes = max_metadata_nbytes
        self._known: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """The metadata, read once and kept; compared with the checksum of the manifest, if there is one.

        Raises:
            CheckpointError: the file is missing or damaged, or is not metadata.
        """
        if self._known is None:
            place = self.fs.concat_path(self.path, METADATA)  # torch 2.6 takes no str here
            path = str(place)
            if not self.fs.exists(place):
                raise CheckpointError(f"A checkpoint must have a {METADATA}, but there is no {path}.")
            try:
                with self.fs.create_stream(place, "rb") as file:
                    data = read_at_most(file, self._max_metadata_nbytes)
                vouched = None if self.manifest is None else self.manifest.files.get(METADATA)
                if vouched is not None:
                    check_crc(path, zlib.crc32(data), vouched)
                self._known = read_metadata(data, self._limits)
            except CheckpointError:
                raise
            except Exception as error:  # damaged pickles can raise anything
                raise CheckpointError(
                    f"{path} must be metadata of a checkpoint, but is not: {first_line(error)} It is damaged, or "
                    "made to run code or to fill memory. Use another checkpoint."
                ) from error
        return self._known

    def check_vouched(self, allow_unverified: bool, warns: bool = True) -> None:
        """Check that the manifest vouches for all files; without a manifest, that none is missing.

        Checkpoints of plain torch have none, nor any mark of ours: they are read with a warning, if this process
        ``warns``.

        Raises:
            CheckpointError: a file is not in the manifest; or the metadata are marked as ours, but the manifest is
                missing, unless ``allow_unverified``.
        """
        known = self.read_metadata()
        if self.manifest is None:
            if is_marked(known) and not allow_unverified:
                raise CheckpointError(
                    f"{self._folder} must have the {MANIFEST} that it was saved with, but it is missing, so nothing "
                    "shows whether the files are whole. Use another checkpoint; to read this one unchecked, pass "
                    "allow_unverified=True."
                )
            if warns:
                text = f"{self._folder} has no {MANIFEST}: its files are not compared with checksums."
                warnings.warn(text, stacklevel=level_of_user())
            return
        unknown = {place.relative_path for place in known.storage_data.values()} - self.manifest.files.keys()
        if unknown:
            raise CheckpointError(
                f"The manifest must list all files, but {self._folder}/{MANIFEST} does not list {min(unknown)}: it "
                "belongs to another checkpoint. Use another checkpoint."
            )

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
                entry = error.name if isinstance(error, EntryError) else items[0].storage_index.fqn
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
        path = str(self.fs.concat_path(self.path, name))
        entries: dict[MetadataIndex, Entry] = {}
        nbytes = 0
        if self._reads_in_place and not has_transforms:
            entries, nbytes = _entries(items, places, planner), os.path.getsize(path)
        if not nbytes or not can_read(list(entries.values()), nbytes):
            if sums:
                assert self.manifest is not None
                verify_file(self._storage, self._folder, name, self.manifest.files[name])
            if items:
                self._read_each(path, items, planner)
            return
        crc = read_entries(path, nbytes, list(entries.values()), sums)
        if crc is not None:
            assert self.manifest is not None
            check_crc(path, crc, self.manifest.files[name])
        for item in items:
            if item.type is LoadItemType.BYTE_IO:
                _load_object(item, entries[item.storage_index], planner)

    def _read_each(self, path: str, items: list[ReadItem], planner: Any) -> None:
        """Read entries one by one: from a remote file, or with transforms, or where metadata are damaged."""
        with self.fs.create_stream(path, "rb") as stream:
            for item in items:
                try:
                    data = self._bytes_of(item, stream)
                    if item.type is LoadItemType.BYTE_IO:
                        planner.load_bytes(item, io.BytesIO(data))
                    else:
                        target = planner.resolve_tensor(item).detach()
                        cut = Cut(target, item.storage_offsets, item.lengths)
                        target.copy_(part_of(_tensor_in(data), cut))
                        planner.commit_tensor(item, target)
                except OSError:
                    raise
                except Exception as error:  # damaged bytes can raise anything
                    raise EntryError(item.storage_index.fqn) from error

    def _bytes_of(self, item: ReadItem, stream: IO[bytes]) -> bytes:
        place = self.storage_data[item.storage_index]
        stream.seek(place.offset)
        found = bytearray()
        while block := stream.read(min(_MAX_EXTRA_NBYTES, place.length - len(found))):
            found += block
        if len(found) < place.length:
            raise OSError("the file ends too early")
        if not place.transform_descriptors:
            return bytes(found)
        room = _MAX_OBJECT_GROWTH * place.length
        entry = self._known.state_dict_metadata.get(item.storage_index.fqn) if self._known is not None else None
        if isinstance(entry, TensorStorageMetadata):
            room = prod(entry.size) * entry.properties.dtype.itemsize
        opened = self.transforms.transform_load_stream(item, place.transform_descriptors, io.BytesIO(found))
        return read_at_most(opened, room + _MAX_EXTRA_NBYTES)

    def _nbytes_read(self, plan: LoadPlan) -> Counter[str]:
        """Bytes that ``plan`` reads of each file."""
        places = {item.storage_index: self.storage_data.get(item.storage_index) for item in plan.items}
        nbytes: Counter[str] = Counter()
        for place in filter(None, places.values()):
            nbytes[place.relative_path] += place.length
        return nbytes


class _RegularFiles(FileSystem):
    """torch's local file system, except that it opens nothing that could block or never end."""

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file to read it."""
        with open_regular(path) as stream:
            yield stream  # type: ignore[misc]


class _RemoteFiles(FsspecFileSystem):
    """torch's remote file system, except that it opens files to read through ``storage``."""

    def __init__(self, storage: Storage) -> None:
        super().__init__()
        self._storage = storage

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file to read it."""
        with self._storage.open(os.fspath(path), "rb") as stream:
            yield stream  # type: ignore[misc]


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
    """Read an object entry as data, see `read_object`."""
    return read_object(file.read())


def _tensor_in(data: bytes) -> Tensor:
    found = read_object(data)
    if not isinstance(found, Tensor):
        raise ValueError(f"it is {type(found).__name__}, not a tensor")
    return found


def first_line(error: BaseException) -> str:
    """The first line of ``error``'s message, without torch's advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = lines[0].partition(" This is an internal miniz error")[0]
    if text.startswith("Weights only load failed"):  # torch goes on to explain the unsafe way
        cause = next((line for line in lines[1:] if "GLOBAL" in line or "error:" in line), "torch refuses it")
        text = f"it holds more than data: {cause}"
    return text[:_MAX_LINE].rstrip(".") + "."
