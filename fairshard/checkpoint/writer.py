"""Writing with torch.distributed.checkpoint: computes each file's checksum while writing, with few copies."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import pickle
import zlib
from collections.abc import Iterator
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fairshard.checkpoint.agreement import done_on_all_ranks, size_of
from fairshard.checkpoint.manifest import FileEntry
from fairshard.checkpoint.metadata import MARK
from fairshard.checkpoint.reader import METADATA
from fairshard.checkpoint.snapshot import Snapshot
from fairshard.checkpoint.storage import is_remote, storage_of

_BLOCK_NBYTES = 1 << 18  # a block is still in the core's cache when it is written after its checksum
_MIN_WRITE_BACK_NBYTES = 1 << 24
_CAN_LEAVE_CRC_OUT = len(inspect.signature(getattr(torch.serialization, "_save", print)).parameters) == 5


class CheckpointWriter(FileSystemWriter):
    """torch's writer for the ranks of ``group``; `files` has the files of this rank."""

    def __init__(self, folder: str, group: ProcessGroup | None) -> None:
        super().__init__(folder)
        self.path = folder  # as it is: torch takes a URL for a path
        self.files: dict[str, FileEntry] = {}
        self._folder = folder
        self._group = group

    def storage_meta(self) -> StorageMeta:
        """Origin of the checkpoint; plain torch reads it as its own. It says that there is a manifest."""
        found = super().storage_meta() or StorageMeta()
        found.modules = [*getattr(found, "modules", ()), MARK]  # torch < 2.7 has none
        return found

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Do not create the folder: it exists, and torch's method would create it after another rank removed it."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Assign a file to each rank.

        Raises:
            RuntimeError: torch treats this rank as the only one because the default group was destroyed; every rank
                would then write rank 0's files.
        """
        if len(plans) != size_of(self._group):
            raise RuntimeError(f"{size_of(self._group)} ranks must save together, but {len(plans)} do.")
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, and wait until it is on the disk and the other ranks have written theirs.

        torch's method takes 1.5 times as long: it also computes a checksum per tensor, and leaves the disk idle until
        the end.
        """
        done: Future[list[WriteResult]] = Future()
        done.set_result(done_on_all_ranks(self._group, lambda: self._write(plan, planner)))
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, last, on rank 0."""
        metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)  # torch 2.6 has none
        metadata.storage_data = {result.index: result.storage_data for own in results for result in own}
        metadata.storage_meta = self.storage_meta()
        with self._created(METADATA) as stream:
            pickle.dump(metadata, stream)

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        name = f"{plan.storage_data.prefix}0.distcp"
        results = []
        with self._created(name) as stream:
            for item in plan.items:
                start = stream.nbytes
                data = planner.resolve_data(item)
                if isinstance(data, Tensor):
                    _save_tensor(data, stream)
                else:
                    stream.write(data.getbuffer())
                nbytes = stream.nbytes - start
                results.append(WriteResult(item.index, nbytes, _StorageInfo(name, start, nbytes)))
        return results

    @contextlib.contextmanager
    def _created(self, name: str) -> Iterator[Any]:
        """A new file of the folder, to write; at the end it is on the disk, and in `files`.

        Raises:
            OSError: it cannot be written, even if torch's own error only says that a write failed.
        """
        storage, is_local = storage_of(self._folder), not is_remote(self._folder)
        path, stream = storage.join(self._folder, name), None
        try:
            with storage.open(path, "wb") as raw:
                stream = _ChecksumStream(raw, is_local)
                yield stream
                if is_local:
                    os.fsync(stream.fileno())
        except Exception as error:
            failure = (stream and stream.failure) or error
            if not isinstance(failure, OSError):
                raise
            raise OSError(failure.errno, failure.strerror, path) from failure
        self.files[name] = FileEntry(stream.nbytes, stream.crc32)


class SnapshotPlanner(DefaultSavePlanner):
    """torch's planner for a snapshot: it writes the values that the tensors had at that moment."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__(dedup_save_to_lowest_rank=True)
        self._snapshot = snapshot

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The tensor or object to write, on the CPU, in a storage of its exact size."""
        found: Tensor | io.BytesIO = super().resolve_data(write_item)
        if write_item.type == WriteItemType.BYTE_IO or not isinstance(found, Tensor):
            return found
        return _exact(self._snapshot.read(found.detach()).cpu())


def _save_tensor(tensor: Tensor, stream: Any) -> None:
    """``torch.save`` without inner checksums (as after ``set_crc32_options(False)``): the whole file has one.

    That option affects all threads, and training may call ``torch.save`` at the same time. The private API used here
    is the same in torch 2.6 to 2.13; if it changes, both checksums are written.
    """
    if not _CAN_LEAVE_CRC_OUT:
        torch.save(tensor, stream)
        return
    archive = torch._C.PyTorchFileWriter(stream, False)
    try:
        torch.serialization._save(tensor, archive, pickle, torch.serialization.DEFAULT_PROTOCOL, False)
    finally:
        archive.write_end_of_file()


def _exact(tensor: Tensor) -> Tensor:
    """``tensor`` over a storage of its exact size, in the same memory; torch would save the whole storage."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == tensor.nbytes or not tensor.is_contiguous():
        return tensor.contiguous()
    start = tensor.storage_offset() * tensor.element_size()
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(storage[start : start + tensor.nbytes], 0, tensor.shape)  # type: ignore[call-overload, no-any-return]


class _ChecksumStream(io.IOBase):
    """A file written sequentially from its start, with a running checksum."""

    def __init__(self, raw: IO[bytes], is_local: bool) -> None:
        self._raw = raw
        self.nbytes = 0
        self.crc32 = 0
        self.failure: OSError | None = None
        self._starts_early = is_local and hasattr(os, "posix_fadvise")
        self._nbytes_started = 0

    def write(self, block: Any) -> int:
        """Write all of ``block``."""
        view = memoryview(block).cast("B")
        for start in range(0, len(view), _BLOCK_NBYTES):
            self._write(view[start : start + _BLOCK_NBYTES])
        return len(view)

    def _write(self, block: memoryview) -> None:
        self.crc32 = zlib.crc32(block, self.crc32)
        try:
            self._raw.write(block)
        except OSError as error:
            self.failure = error
            raise
        self.nbytes += len(block)
        if self._starts_early and self.nbytes - self._nbytes_started >= _MIN_WRITE_BACK_NBYTES:
            self._start_write_back()

    def _start_write_back(self) -> None:
        """Start writing back now; otherwise the kernel waits for fsync, which then waits for the whole file.

        The advice drops clean pages from the cache and starts to write the dirty ones.
        """
        self._raw.flush()
        start, self._nbytes_started = self._nbytes_started, self.nbytes
        os.posix_fadvise(self._raw.fileno(), start, self.nbytes - start, os.POSIX_FADV_DONTNEED)

    def fileno(self) -> int:
        """Descriptor for fsync; flushes first, so that fsync covers buffered bytes."""
        self._raw.flush()
        return self._raw.fileno()
