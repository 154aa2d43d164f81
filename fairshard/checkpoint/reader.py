"""Reading checkpoints of torch.distributed.checkpoint without running code from them.

A checkpoint is data. But its ``.metadata`` is a pickle, which torch reads with ``pickle.load``, and its object
entries are pickles, which torch's planner reads with ``weights_only=False``: anyone who can write to the folder can
run code in every rank (measured with torch 2.13). Here both are read as data first (``bags.py``).
"""

from __future__ import annotations

import io
import os
import warnings
import zlib
from itertools import groupby
from math import prod
from typing import IO, Any

from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.futures import Future

from fairshard.checkpoint.manifest import Manifest, check_crc
from fairshard.checkpoint.metadata import is_marked, read_metadata
from fairshard.checkpoint.objects import Room, read_object
from fairshard.checkpoint.storage import MANIFEST, read_at_most, storage_of
from fairshard.errors import CheckpointError
from fairshard.utils.user_line import level_of_user

METADATA = ".metadata"
MAX_METADATA_NBYTES = 1 << 30

_MAX_OBJECT_GROWTH = 64
_MAX_LINE = 400  # characters: a damaged file can have a name of any length
_MAX_EXTRA_NBYTES = 1 << 24


class CheckpointReader(FileSystemReader):
    """torch's reader for a local folder or an fsspec URL; what it reads cannot run code.

    ``manifest``, if set before the first read, vouches for the files; the caller has verified all but the metadata.
    """

    def __init__(self, path: str, max_metadata_nbytes: int = MAX_METADATA_NBYTES) -> None:
        super().__init__(path)
        self._storage = storage_of(path)  # which opens files in place of torch's class
        self.manifest: Manifest | None = None
        self.folder = path
        self._room = Room()
        self._max_metadata_nbytes = max_metadata_nbytes
        self._known: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """The metadata, read once and kept; compared with the checksum of the manifest, if there is one.

        Raises:
            CheckpointError: the file is missing or damaged, or is not metadata.
        """
        if self._known is None:
            path = self._storage.join(self.folder, METADATA)
            if not self._storage.exists(path):
                raise CheckpointError(f"A checkpoint must have a {METADATA}, but there is no {path}.")
            try:
                with self._storage.open(path, "rb") as file:
                    data = read_at_most(file, self._max_metadata_nbytes)
                vouched = None if self.manifest is None else self.manifest.files.get(METADATA)
                if vouched is not None:
                    check_crc(path, zlib.crc32(data), vouched)
                self._known = read_metadata(data)
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
                    f"{self.folder} must have the {MANIFEST} that it was saved with, but it is missing, so nothing "
                    "shows whether the files are whole. Use another checkpoint; to read this one unchecked, pass "
                    "allow_unverified=True."
                )
            if warns:
                text = f"{self.folder} has no {MANIFEST}: its files are not compared with checksums."
                warnings.warn(text, stacklevel=level_of_user())
            return
        unknown = {place.relative_path for place in known.storage_data.values()} - self.manifest.files.keys()
        if unknown:
            raise CheckpointError(
                f"The manifest must list all files, but {self.folder}/{MANIFEST} does not list {min(unknown)}: it "
                "belongs to another checkpoint. Use another checkpoint."
            )

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Read the entries of ``plan``, file by file.

        Raises:
            CheckpointError: a file is missing or damaged, or holds an entry that could run code.
        """
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            place = self.storage_data.get(item.storage_index)
            if place is None:
                raise CheckpointError(
                    f"{self.folder}/{METADATA} must say where all of `{item.storage_index.fqn}` is, but does not. "
                    "It is damaged. Use another checkpoint."
                )
            by_file.setdefault(place.relative_path, []).append(item)
        for name, items in by_file.items():
            path = self._storage.join(self.folder, name)
            try:
                with self._storage.open(path, "rb") as stream:
                    for _, parts in groupby(sorted(items, key=self._begin_of), self._begin_of):
                        self._read(path, list(parts), stream, planner)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error
        self._room = Room()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _begin_of(self, item: ReadItem) -> int:
        """Where the entry of ``item`` begins in its file: two entries never share bytes."""
        return int(self.storage_data[item.storage_index].offset)

    def _read(self, path: str, parts: list[ReadItem], stream: IO[bytes], planner: Any) -> None:
        """Read one entry, of which ``parts`` are wanted."""
        name = parts[0].storage_index.fqn
        try:
            if parts[0].type is LoadItemType.BYTE_IO:
                file, nbytes = self._opened(parts[0], stream)
                planner.load_bytes(parts[0], io.BytesIO(file.read(nbytes)))
                return
            found = read_object(*self._opened(parts[0], stream), self._room)
            if not isinstance(found, Tensor):
                raise ValueError(f"it is {type(found).__name__}, not a tensor")
            for item in parts:
                part, target = found, planner.resolve_tensor(item).detach()
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    part = part.narrow(dim, start, length)
                if part.shape != target.shape:
                    raise ValueError(f"it has the shape {tuple(found.shape)}, which is not the one that was saved")
                target.copy_(part)
                planner.commit_tensor(item, target)
        except OSError:
            raise
        except Exception as error:  # damaged bytes can raise anything
            raise CheckpointError(
                f"{path} must hold `{name}`, but it cannot be read from there: {first_line(error)}"
            ) from error

    def _opened(self, item: ReadItem, stream: IO[bytes]) -> tuple[IO[bytes], int]:
        """What ``torch.save`` wrote for an entry, as the next bytes of a file."""
        place = self.storage_data[item.storage_index]
        if place.offset + place.length > stream.seek(0, os.SEEK_END):
            raise OSError("the file ends too early")
        stream.seek(place.offset)
        if not place.transform_descriptors:
            return stream, place.length
        most = _MAX_OBJECT_GROWTH * place.length
        entry = self._known.state_dict_metadata.get(item.storage_index.fqn) if self._known is not None else None
        if isinstance(entry, TensorStorageMetadata):
            most = prod(entry.size) * entry.properties.dtype.itemsize
        found = io.BytesIO(stream.read(place.length))
        opened = self.transforms.transform_load_stream(item, place.transform_descriptors, found)
        plain = read_at_most(opened, most + _MAX_EXTRA_NBYTES)
        return io.BytesIO(plain), len(plain)


class SafePlanner(DefaultLoadPlanner):
    """torch's planner, except that it reads objects as data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Store an object in the state dict.

        Raises:
            UnpicklingError: the object holds anything but tensors, numbers, strings and containers of them.
        """
        found = read_object(value, len(value.getbuffer()), Room())
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], found)
        else:
            self.state_dict[read_item.dest_index.fqn] = found


def first_line(error: BaseException) -> str:
    """The first line of ``error``'s message, without torch's advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = lines[0].partition(" This is an internal miniz error")[0]
    if text.startswith("Weights only load failed"):  # torch goes on to explain the unsafe way
        cause = next((line for line in lines[1:] if "GLOBAL" in line or "error:" in line), "torch refuses it")
        text = f"it holds more than data: {cause}"
    return text[:_MAX_LINE].rstrip(".") + "."
