"""Folder of a run in the memory of a host, below ``/dev/shm``; it outlives the processes of the run.

    /dev/shm/fairshard-<run>/                   only its user may read it
        root                                    the folder of the run's checkpoints
        step-00000120-<life>-11/                the 11th copy of one start of the run: an ordinary checkpoint
            __0_0.distcp  __1_0.distcp          files of ranks of this host, and copies for ranks of another
            .metadata  fairshard.json           on every host; the manifest is written last
        .tmp-step-00000130-<life>-12/           the copy being written

``<run>`` is a random name that the file ``.memory`` beside the checkpoints holds. A run that does not continue a copy
takes a new name. Memory of another name is never read, not even on a host that was away and comes back; the next run of
the same root removes it, unless a process holds it: containers that share memory may have other folders of that name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import uuid
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fairshard.checkpoint.manifest import Manifest, read_manifest
from fairshard.checkpoint.storage import MANIFEST, TEMPORARY, LocalStorage, storage_of
from fairshard.errors import CheckpointError

MEMORY_FOLDER = "/dev/shm"

_NAME = ".memory"
_RUN = re.compile(r"[0-9a-f]{32}")
_PREFIX, _ROOT = "fairshard-", "root"
_MAX_NAME_NBYTES = 64
_COPY = re.compile(r"step-(\d{8,})-[0-9a-f]{8}-\d+")


@dataclass(frozen=True)
class FoundCopy:
    """A copy on one host: its name, its manifest, the CRC-32 of that file, and the complete files that lie here."""

    name: str
    manifest: Manifest
    crc32: int
    files: frozenset[str]

    @property
    def step(self) -> int:
        """The step of the copy."""
        return self.manifest.step or 0


def run_name(root: str) -> str | None:
    """The name of the run whose checkpoints are in ``root``; None if it has none.

    Raises:
        CheckpointError: the file that holds it is damaged.
    """
    storage = storage_of(root)
    path = storage.join(root, _NAME)
    if not storage.exists(path):
        return None
    try:
        found = storage.read_text(path, _MAX_NAME_NBYTES).strip()
        if not _RUN.fullmatch(found):
            raise ValueError(f"it is {found!r}")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} must hold the name under which a run keeps copies in memory, but does not: {error}. Remove it to "
            "continue from the checkpoints on disk."
        ) from error
    return found


def new_run_name(root: str) -> str:
    """Give the run a new name: nothing reads its memory of before.

    Raises:
        OSError: it cannot be written.
    """
    storage = storage_of(root)
    name = uuid.uuid4().hex
    storage.make(root)
    storage.replace_text(storage.join(root, _NAME), name)
    return name


def forget_run(root: str) -> None:
    """Remove the name of the run: nothing reads its memory any more."""
    storage = storage_of(root)
    with contextlib.suppress(OSError):
        storage.remove(storage.join(root, _NAME))


def memory_left(root: str, parent: str = MEMORY_FOLDER) -> str | None:
    """The folder with copies of the run of ``root`` on this host; None if there is none."""
    with contextlib.suppress(CheckpointError):
        name = run_name(root)
        folder = f"{parent}/{_PREFIX}{name}"
        return folder if name is not None and _is_own(folder) and MemoryFolder(folder).copies() else None
    return None


def open_folder(parent: str, run: str, root: str) -> MemoryFolder:
    """Make the folder of ``run`` below ``parent`` unless it exists.

    Raises:
        CheckpointError: ``parent`` is not a folder, or the folder belongs to someone else.
    """
    if not os.path.isdir(parent):
        raise CheckpointError(
            f"Copies in memory need a folder in memory, but {parent} is not a folder. Pass `memory_folder`, or leave "
            "`memory_every` out."
        )
    folder = MemoryFolder(f"{parent}/{_PREFIX}{run}")
    folder.make(root)
    return folder


def _is_own(path: str) -> bool:
    """Whether ``path`` is a folder, not a link, that this user owns and nobody else may read or write."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _is_held(path: str) -> bool:
    """Whether a process of any container uses the folder of a run."""
    with open(f"{path}/{_ROOT}") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            pass
    return False


class MemoryFolder:
    """The folder of one run on one host. One rank of the host, its leader, removes and renames."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._storage = LocalStorage()
        self._held: IO[str] | None = None

    def make(self, root: str) -> None:
        """Make the folder for the run of ``root``, unless it exists, and hold it until `release`.

        Raises:
            CheckpointError: the folder belongs to someone else.
        """
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path, mode=0o700)
        if not _is_own(self.path):
            raise CheckpointError(f"{self.path} must be a folder of this user, which nobody else may read, but is not.")
        with contextlib.suppress(FileExistsError), open(f"{self.path}/{_ROOT}", "x") as file:
            file.write(root)
        self._held = open(f"{self.path}/{_ROOT}")  # noqa: SIM115
        with contextlib.suppress(OSError):  # another file system than that of a memory may have no locks
            fcntl.flock(self._held, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def remake(self, root: str) -> None:
        """`make` the folder if somebody has removed it."""
        if not os.path.exists(f"{self.path}/{_ROOT}"):
            self.make(root)

    def release(self) -> None:
        """Let another run of the same root remove the folder."""
        if self._held is not None:
            with contextlib.suppress(OSError):  # forked workers share what is held
                fcntl.flock(self._held, fcntl.LOCK_UN)
            self._held.close()
            self._held = None

    def path_of(self, name: str) -> str:
        """The path of the copy ``name``."""
        return f"{self.path}/{name}"

    def unfinished(self, name: str) -> str:
        """The path of the copy ``name`` while it is written."""
        return f"{self.path}/{TEMPORARY}{name}"

    def copies(self) -> list[FoundCopy]:
        """The copies whose manifest is intact. Of their files, only sizes are compared: they may be damaged."""
        found = (self._found(name) for name in self._storage.names(self.path) if _COPY.fullmatch(name))
        return [copy for copy in found if copy is not None]

    def _found(self, name: str) -> FoundCopy | None:
        folder = self.path_of(name)
        try:
            manifest = read_manifest(self._storage, folder)
            if manifest is None or manifest.step != _step_of(name):
                return None
            crc = zlib.crc32(Path(folder, MANIFEST).read_bytes())
            files = [file for file, entry in manifest.files.items() if _size(f"{folder}/{file}") == entry.nbytes]
            return FoundCopy(name, manifest, crc, frozenset(files))
        except (CheckpointError, OSError):
            return None

    def publish(self, name: str, manifest: Manifest) -> None:
        """Write the manifest of the copy ``name``, whose files are complete, then give the copy its name."""
        self._storage.replace_text(f"{self.unfinished(name)}/{MANIFEST}", manifest.to_json())
        os.rename(self.unfinished(name), self.path_of(name))

    def add_manifest(self, name: str, manifest: Manifest) -> None:
        """Write the manifest of the copy ``name``, whose files were fetched from other hosts."""
        self._storage.replace_text(f"{self.path_of(name)}/{MANIFEST}", manifest.to_json())

    def keep_only(self, name: str) -> None:
        """Remove all other copies."""
        self._remove_all(lambda other: other == name)

    def drop_unfinished(self) -> None:
        """Remove copies that were not published."""
        self._remove_all(lambda name: not name.startswith(TEMPORARY))

    def drop_after(self, step: int) -> None:
        """Remove unfinished copies, and copies of later steps than ``step``."""
        self._remove_all(lambda name: bool(_COPY.fullmatch(name)) and _step_of(name) <= step)

    def drop_other_runs(self, root: str) -> None:
        """Remove the memory of earlier runs of the same ``root``, whose names nothing holds any more."""
        parent = os.path.dirname(self.path)
        for name in self._storage.names(parent):
            other = f"{parent}/{name}"
            if name.startswith(_PREFIX) and other != self.path and _is_own(other):
                with contextlib.suppress(OSError, ValueError):
                    if self._storage.read_text(f"{other}/{_ROOT}") == root and not _is_held(other):
                        shutil.rmtree(other, ignore_errors=True)

    def remove(self) -> None:
        """Remove the folder."""
        self.release()
        shutil.rmtree(self.path, ignore_errors=True)

    def nbytes(self) -> int:
        """Bytes of all files in the folder."""
        return sum(max(_size(f"{base}/{name}"), 0) for base, _, names in os.walk(self.path) for name in names)

    def free_nbytes(self) -> int:
        """Bytes that still fit into the file system of the folder."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def _remove_all(self, is_kept: Callable[[str], bool]) -> None:
        for name in self._storage.names(self.path):
            if name != _ROOT and not is_kept(name):
                self._remove(f"{self.path}/{name}")

    def _remove(self, path: str) -> None:
        """Remove a copy; a partly removed one has no manifest."""
        with contextlib.suppress(OSError):
            os.unlink(f"{path}/{MANIFEST}")
        self._storage.remove(path)


def _step_of(name: str) -> int:
    return int(name.split("-")[1])


def _size(path: str) -> int:
    """Bytes of a file; -1 if it is missing."""
    try:
        return os.path.getsize(path)
    except OSError:
        return -1
