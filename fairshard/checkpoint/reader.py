"""Reading checkpoints of torch.distributed.checkpoint without running code from them.

A checkpoint is data. But its ``.metadata`` is a pickle, which torch reads with ``pickle.load``, and its object
entries are pickles, which torch's planner reads with ``weights_only=False``: anyone who can write to the folder can
run code in every rank (measured with torch 2.13). Here the metadata go through an unpickler that allows only the
classes of such metadata, and object entries through ``weights_only=True``, as tensors always do.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections import OrderedDict
from typing import IO, Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as FsspecFileSystem
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.futures import Future

from fairshard.checkpoint.storage import is_remote
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
    """torch's reader for a local folder or an fsspec URL; its metadata cannot run code."""

    def __init__(self, path: str) -> None:
        super().__init__(path if not is_remote(path) else ".")
        if is_remote(path):
            self.fs: Any = FsspecFileSystem()
            self.path = self.fs.init_path(path)
        self._known: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """The metadata, read once and kept.

        Raises:
            CheckpointError: the file is missing, or is not metadata.
        """
        if self._known is None:
            path = self.fs.concat_path(self.path, METADATA)
            if not self.fs.exists(path):
                raise CheckpointError(f"A checkpoint must have a {METADATA}, but there is no {path}.")
            try:
                with self.fs.create_stream(path, "rb") as file:
                    self._known = _checked(_MetadataUnpickler(file).load())
            except Exception as error:  # damaged pickles can raise anything
                raise CheckpointError(
                    f"{path} must be metadata of a checkpoint, but is not: {error}. It is damaged, or made to run "
                    "code. Use another checkpoint."
                ) from error
        return self._known

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
                    f"{self.fs.concat_path(self.path, METADATA)} must say where all of `{item.storage_index.fqn}` is, "
                    "but does not. It is damaged. Use another checkpoint."
                )
            by_file.setdefault(place.relative_path, []).append(item)
        for name, items in by_file.items():
            try:
                done: Future[None] = super().read_data(LoadPlan(items), planner)
                done.wait()
            except Exception as error:
                path, entry = self.fs.concat_path(self.path, name), self._unreadable(items, planner)
                raise CheckpointError(
                    f"{path} must hold `{entry}`, but it cannot be read from there: {first_line(error)}"
                ) from error
        done = Future()
        done.set_result(None)
        return done

    def _unreadable(self, items: list[ReadItem], planner: Any) -> str:
        """The first of ``items`` that cannot be read."""
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
