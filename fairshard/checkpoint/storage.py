"""Storage of checkpoints: a local disk, or any file system that fsspec supports (``s3://...``).

On a local disk, publishing is durable: it syncs the files, then their folder, then the new name. Remote storage has no
atomic rename, so only the order of writes counts: a checkpoint is complete once its manifest exists.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from fairshard.errors import CheckpointError

_BLOCK_NBYTES = 1 << 18
MANIFEST = "fairshard.json"
TEMPORARY = ".tmp-"
"""Prefix of the names of unfinished files and folders."""


class Storage:
    """Local and mounted folders; `RemoteStorage` does the same elsewhere. Writing a file creates its folder."""

    def read_text(self, path: str, max_nbytes: int = 4096) -> str:
        """Text of a small file.

        Raises:
            ValueError: it has more than ``max_nbytes``, or is not a text.
        """
        with self.open(path, "rb") as file:
            return read_at_most(file, max_nbytes).decode()

    @staticmethod
    def join(folder: str, name: str) -> str:
        """The path of ``name`` in ``folder``."""
        return f"{folder.rstrip('/')}/{name}"

    @staticmethod
    def parent(path: str) -> str:
        """The folder that contains ``path``."""
        return path.rstrip("/").rpartition("/")[0] or "."

    def open(self, path: str, mode: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """Open a file; to read it, it must be a regular one (`open_regular`)."""
        return open_regular(path) if mode == "rb" else Path(path).open(mode)

    def names(self, folder: str) -> list[str]:
        """Names in a folder, sorted; empty if the folder does not exist."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(os.listdir(folder))
        return []

    def exists(self, path: str) -> bool:
        """Whether ``path`` is a file or folder."""
        return os.path.exists(path)

    def is_free(self, path: str) -> bool:
        """Whether a folder can be published as ``path``: it does not exist, or is an empty folder."""
        return not os.path.lexists(path) or (os.path.isdir(path) and not os.listdir(path))

    def size(self, path: str) -> int:
        """Bytes of a file."""
        return os.path.getsize(path)

    def make(self, folder: str) -> None:
        """Create a folder and its parents, durably."""
        new = []
        while folder and not os.path.isdir(folder):
            new.append(folder)
            folder = os.path.dirname(folder)
        for made in reversed(new):
            with contextlib.suppress(FileExistsError):  # by another rank; below a file, the next one raises
                os.mkdir(made)
            _sync(self.parent(made))

    def publish(self, folder: str, name: str) -> None:
        """Move ``folder`` to its final path ``name``, durably: sync it, rename it, sync its parent."""
        _sync(folder)
        os.rename(folder, name)
        _sync(self.parent(name))

    def discard(self, folder: str, aside: str) -> None:
        """Remove a checkpoint; a partly removed one never looks whole. ``aside``: an unused path in the same folder."""
        self.remove(aside)
        self.publish(folder, aside)
        self.remove(aside)

    def replace_text(self, path: str, text: str) -> None:
        """Replace a small file durably, by a temporary one beside it: readers see either the old text or the new."""
        if os.path.islink(path) or os.path.isdir(path):
            raise OSError(errno.EEXIST, "it is a link or a folder, which fairshard did not make", path)
        folder, name = os.path.split(path)
        beside = os.path.join(folder, f"{TEMPORARY}{name}-{os.getpid()}")
        try:
            with open(beside, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
            _sync(folder or ".")
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise OSError(error.errno, error.strerror, path) from error

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with its contents; does nothing if ``path`` is missing."""
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


class RemoteStorage(Storage):
    """Storage that fsspec opens for ``url``."""

    def __init__(self, url: str) -> None:
        self._fs: Any
        protocol = url.partition("://")[0]
        try:
            self._fs, _ = url_to_fs(url)
        except ImportError as error:
            raise CheckpointError(f"{protocol}:// needs a package that is not installed: {error}.") from error
        except Exception as error:  # each protocol has its own
            raise CheckpointError(f"{url} must be a URL that fsspec can open, but: {error}.") from error

    @contextlib.contextmanager
    def open(self, path: str, mode: str) -> Iterator[IO[bytes]]:
        """Open a file; a failed write leaves no file behind. ``file://`` is read as `Storage` does."""
        is_local = mode == "rb" and isinstance(self._fs, LocalFileSystem)
        with open_regular(self._fs._strip_protocol(path)) if is_local else self._fs.open(path, mode) as file:
            yield file

    def names(self, folder: str) -> list[str]:
        """Names in a folder, sorted."""
        self._fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            return sorted(str(entry).rstrip("/").rpartition("/")[2] for entry in self._fs.ls(folder, detail=False))
        return []

    def exists(self, path: str) -> bool:
        """Whether ``path`` is a file or folder."""
        self._fs.invalidate_cache()
        return bool(self._fs.exists(path))

    def is_free(self, path: str) -> bool:
        """Whether ``path`` does not exist."""
        return not self.names(path) and not self.exists(path)

    def size(self, path: str) -> int:
        """Bytes of a file."""
        return int(self._fs.size(path))

    def make(self, folder: str) -> None:
        """Create a folder and its parents."""
        self._fs.makedirs(folder, exist_ok=True)

    def publish(self, folder: str, name: str) -> None:
        """Copy file by file, the manifest last, then remove ``folder``."""
        self.make(name)
        try:
            for file in sorted(self.names(folder), key=lambda file: (file == MANIFEST, file)):
                self._fs.cp_file(self.join(folder, file), self.join(name, file))
        except BaseException:
            self.remove(name)
            raise
        self.discard(folder, "")

    def discard(self, folder: str, aside: str) -> None:
        """Remove the manifest first, then the folder."""
        self.remove(self.join(folder, MANIFEST))
        self.remove(folder)

    def replace_text(self, path: str, text: str) -> None:
        """Write the file in one request."""
        self._fs.pipe_file(path, text.encode())

    def remove(self, path: str) -> None:
        """Remove a file or a folder."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(path, recursive=True)


def read_at_most(file: IO[bytes], max_nbytes: int) -> bytes:
    """All bytes of a file, block by block: ``file.read(n)`` allocates ``n`` bytes first.

    Raises:
        ValueError: there are more than ``max_nbytes``.
    """
    found = bytearray()
    while block := file.read(min(_BLOCK_NBYTES, max_nbytes + 1 - len(found))):
        found += block
        if len(found) > max_nbytes:
            raise ValueError(f"it has more than {max_nbytes:,} bytes")
    return bytes(found)


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a file to read it, unless it is a pipe, a device or the like, which could block or never end.

    Raises:
        OSError: it cannot be opened, or is not a regular file on a disk.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_dev in _kernel_devices():
            raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
        if hasattr(os, "O_NONBLOCK"):
            os.set_blocking(descriptor, True)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


@functools.cache
def _kernel_devices() -> frozenset[int]:
    """File systems whose files are made by the kernel while they are read."""
    found = set()
    for folder in ("/proc", "/sys"):
        with contextlib.suppress(OSError):
            found.add(os.stat(folder).st_dev)
    return frozenset(found - {os.stat("/").st_dev})


def storage_of(path: str | os.PathLike[str]) -> Storage:
    """The storage of ``path``."""
    return RemoteStorage(os.fspath(path)) if is_remote(path) else Storage()


def full_path(path: str | os.PathLike[str]) -> str:
    """``path`` without a trailing slash; absolute on a local disk, so that a later ``chdir`` does not matter."""
    return os.fspath(path).rstrip("/") if is_remote(path) else os.path.abspath(path)


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` names a protocol and therefore goes through fsspec."""
    return "://" in os.fspath(path)


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
