"""Writing with torch.distributed.checkpoint: each file's checksum on the way, and no copy that can be spared."""

from __future__ import annotations

import contextlib
import io
import os
import zlib
from collections.abc import Iterator
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as FsspecFileSystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from fairshard.checkpoint.manifest import FileEntry
from fairshard.checkpoint.snapshot import Snapshot
from fairshard.checkpoint.storage import is_remote


class CheckpointWriter(FileSystemWriter):
    """torch's writer; `files` has what was written on this rank."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder if not is_remote(folder) else ".", sync_files=not is_remote(folder), overwrite=False)
        self.per_thread_copy_ahead = 0
        self.files: dict[str, FileEntry] = {}
        if is_remote(folder):
            self.fs = _checked(FsspecFileSystem)(self.files)
            self.path = self.fs.init_path(folder)
        else:
            self.fs = _checked(FileSystem)(self.files)


class SnapshotPlanner(DefaultSavePlanner):
    """torch's planner over a snapshot: what is written is what was there when it was taken."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__(dedup_save_to_lowest_rank=True)
        self._snapshot = snapshot

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The box or object to write, on the CPU, in a storage of its exact size."""
        found: Tensor | io.BytesIO = super().resolve_data(write_item)
        if write_item.type == WriteItemType.BYTE_IO or not isinstance(found, Tensor):
            return found
        return _exact(self._snapshot.read(found.detach()))


def _exact(tensor: Tensor) -> Tensor:
    """``tensor`` in a storage that holds nothing else, for else torch would save all of it; the same memory."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == tensor.nbytes or not tensor.is_contiguous():
        return tensor.contiguous()
    start = tensor.storage_offset() * tensor.element_size()
    alias = torch.empty(0, dtype=tensor.dtype)
    return alias.set_(storage[start : start + tensor.nbytes], 0, tensor.shape)  # type: ignore[call-overload, no-any-return]


def _checked(base: type[Any]) -> Any:
    """``base``, a file system of torch's, noting size and checksum of what is written."""

    class CheckedFileSystem(base):  # type: ignore[misc]
        def __init__(self, files: dict[str, FileEntry]) -> None:
            super().__init__()
            self._files = files

        @contextlib.contextmanager
        def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
            with super().create_stream(path, mode) as stream:
                if "w" not in mode:
                    yield stream
                    return
                checked = _ChecksumStream(stream)
                try:
                    yield checked
                except Exception:
                    if checked.failure is None:
                        raise
                    failure = checked.failure  # torch only says that a write failed
                    raise OSError(failure.errno, failure.strerror, os.fspath(path)) from failure
            self._files[_name(path)] = FileEntry(checked.nbytes, checked.crc32)

        def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
            super().rename(path, new_path)
            if _name(path) in self._files:
                self._files[_name(new_path)] = self._files.pop(_name(path))

    return CheckedFileSystem


class _ChecksumStream(io.IOBase):
    """A file being written from its beginning on."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self.nbytes = 0
        self.crc32 = 0
        self.failure: OSError | None = None

    def write(self, block: Any) -> int:
        """Write all of ``block``."""
        view = memoryview(block).cast("B")
        self.crc32 = zlib.crc32(view, self.crc32)
        self.nbytes += len(view)
        try:
            self._raw.write(view)
        except OSError as error:
            self.failure = error
            raise
        return len(view)

    def tell(self) -> int:
        """Bytes written."""
        return self.nbytes

    def writable(self) -> bool:
        """Yes."""
        return True

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        if not self._raw.closed:
            self._raw.flush()

    def fileno(self) -> int:
        """For fsync, which takes what is buffered along."""
        self._raw.flush()
        return self._raw.fileno()

    def close(self) -> None:
        """Close the file."""
        self._raw.close()


_WRITE_BACK_NBYTES = 1 << 24


def _name(path: str | os.PathLike[str]) -> str:
    return os.fspath(path).rstrip("/").rpartition("/")[2]
