"""Reading checkpoints of torch.distributed.checkpoint without running code from them.

A checkpoint is data. But its ``.metadata`` is a pickle, which torch reads with ``pickle.load``, and its object
entries are pickles, which torch's planner reads with ``weights_only=False``: anyone who can write to the folder can
run code in every rank (measured with torch 2.13). Here both are read as data first (``bags.py``).
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
import warnings
import zlib
from collections.abc import Iterator
from itertools import groupby
from typing import IO, Any

from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.futures import Future

from fairshard.checkpoint.manifest import Manifest, check_crc, read_manifest, verify_file
from fairshard.checkpoint.metadata import is_marked, read_metadata
from fairshard.checkpoint.objects import read_object
from fairshard.checkpoint.storage import MANIFEST, read_at_most, storage_of
from fairshard.errors import CheckpointError
from fairshard.utils.user_line import level_of_user

METADATA = ".metadata"
MAX_METADATA_NBYTES = 1 << 30

_filters = threading.Lock()
_MAX_LINE = 400  # characters: a damaged file can have a name of any length


class CheckpointReader(FileSystemReader):
    """torch's reader for a local folder or an fsspec URL; what it reads cannot run code."""

    def __init__(self, path: str, max_metadata_nbytes: int = MAX_METADATA_NBYTES) -> None:
        super().__init__(path)
        self._storage = storage_of(path)  # which opens files in place of torch's class
        self.manifest: Manifest | None = None
        self.folder = path
        self._room = bytearray()  # kept, because new memory costs more than reading
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

    def check_files(self, allow_unverified: bool, step: int | None = None, rank: int = 0, num_ranks: int = 1) -> None:
        """Read manifest and metadata, and compare this rank's share of the files with their checksums.

        Checkpoints of plain torch have no manifest, nor any mark of ours: rank 0 warns.

        Raises:
            CheckpointError: a file is missing, damaged or not in the manifest; or the metadata are marked as ours, but
                the manifest is missing, unless ``allow_unverified``; or the manifest is of another ``step``.
        """
        self.manifest = read_manifest(self._storage, self.folder)
        files = {} if self.manifest is None else self.manifest.files
        for name in sorted(files, key=_in_order_of_ranks)[rank::num_ranks]:
            verify_file(self._storage, self.folder, name, files[name])
        known = self.read_metadata()
        if self.manifest is None:
            if is_marked(known) and not allow_unverified:
                raise CheckpointError(
                    f"{self.folder} must have the {MANIFEST} that it was saved with, but it is missing, so nothing "
                    "shows whether the files are whole. Use another checkpoint; to read this one unchecked, pass "
                    "allow_unverified=True."
                )
            if rank == 0:
                text = f"{self.folder} has no {MANIFEST}: its files are not compared with checksums."
                warnings.warn(text, stacklevel=level_of_user())
        elif unknown := {place.relative_path for place in known.storage_data.values()} - files.keys():
            raise CheckpointError(
                f"The manifest must list all files, but {self.folder}/{MANIFEST} does not list {min(unknown)}: it "
                "belongs to another checkpoint. Use another checkpoint."
            )
        found = None if self.manifest is None else self.manifest.step
        if step not in (None, found):
            raise CheckpointError(
                f"{self.folder} must be the checkpoint of step {step}, but its {MANIFEST} says "
                f"{'no step' if found is None else f'step {found}'}: the folder was renamed. Give it the name of its "
                "step."
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
        self._room = bytearray()
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
            data = self._data_of(parts[0], stream)
            if parts[0].type is LoadItemType.BYTE_IO:
                planner.load_bytes(parts[0], io.BytesIO(data))
                return
            found = read_object(data)
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

    def _data_of(self, item: ReadItem, stream: IO[bytes]) -> memoryview:
        """What ``torch.save`` wrote for an entry, in memory that the next entry overwrites."""
        place = self.storage_data[item.storage_index]
        if place.offset + place.length > stream.seek(0, os.SEEK_END):
            raise OSError("the file ends too early")
        stream.seek(place.offset)
        if place.transform_descriptors:
            raise ValueError("it is packed by an extension of torch.distributed.checkpoint: load and save it with that")
        if len(self._room) < place.length:
            self._room = bytearray(place.length)
        data = memoryview(self._room)[: place.length]
        if stream.readinto(data) < place.length:  # type: ignore[attr-defined]
            raise OSError("the file ends too early")
        return data


class SafePlanner(DefaultLoadPlanner):
    """torch's planner, except that it reads objects as data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Store an object in the state dict.

        Raises:
            UnpicklingError: the object holds anything but tensors, numbers, strings and containers of them.
        """
        found = read_object(value.getbuffer())
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], found)
        else:
            self.state_dict[read_item.dest_index.fqn] = found


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Ignore warnings, in one thread at a time: torch's functions warn if there is no process group.

    Threads that overlapped here would restore each other's filters, and leave all warnings ignored.
    """
    with _filters, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _in_order_of_ranks(name: str) -> tuple[bool, int, str]:
    """Sort key that gives each rank, of as many as have saved, its own file: ``__2_0.distcp`` before ``__10_0``."""
    return name == METADATA, len(name), name


def first_line(error: BaseException) -> str:
    """The first line of ``error``'s message, without torch's advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = lines[0].partition(" This is an internal miniz error")[0]
    if text.startswith("Weights only load failed"):  # torch goes on to explain the unsafe way
        cause = next((line for line in lines[1:] if "GLOBAL" in line or "error:" in line), "torch refuses it")
        text = f"it holds more than data: {cause}"
    return text[:_MAX_LINE].rstrip(".") + "."
