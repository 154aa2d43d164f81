"""Output of the offline tools: a new file or folder, written atomically; and tensors in a memory-mapped file."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from fairshard.checkpoint.reader import first_line
from fairshard.checkpoint.storage import Storage
from fairshard.errors import CheckpointError

_ALIGNMENT = 64


class NewOutput:
    """A work folder beside ``out``, on the same disk; ``publish`` renames it, or a file in it, to ``out``.

    The end of the ``with`` block always removes the work folder. An OSError inside becomes a CheckpointError that
    names ``out``.

    Raises:
        CheckpointError: ``out`` exists, or its parent folder does not.
    """

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self.out = Path(out)
        self.work = self.out.parent / f"{self.out.name}.tmp-{os.getpid()}"
        self._storage = Storage()
        self._check()

    def publish(self, name: str | None = None) -> None:
        """Sync all files, then rename the work folder, or the file ``name`` in it, to ``out``."""
        for file in self.work.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        self._check()
        self._storage.publish(str(self.work / name if name else self.work), str(self.out))

    def _check(self) -> None:
        if os.path.lexists(self.out):
            raise CheckpointError(f"{self.out} exists, and is never overwritten. Pass a new name, or remove it.")
        if not os.path.isdir(self.out.parent):
            raise CheckpointError(f"The parent of {self.out} must be a folder, but is not one. Create it.")

    def __enter__(self) -> NewOutput:
        try:
            self.work.mkdir()
        except OSError as error:
            raise CheckpointError(f"{self.out} cannot be written: {error}.") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._storage.remove(str(self.work))
        if isinstance(error, OSError):
            raise CheckpointError(f"{self.out} cannot be written: {first_line(error)}") from error


def mapped_like(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Empty tensors like ``tensors`` (which may be on the meta device), each with its own storage.

    Their memory is an unlinked file in ``folder``. The kernel writes its pages back under memory pressure, so tensors
    larger than memory fit. The space is freed with the last tensor. It is allocated now: a full disk raises OSError
    here instead of SIGBUS at the first write.
    """
    offsets, end = {}, 0
    for name, tensor in tensors.items():
        offsets[name] = end
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, max(end, 1))
        pages = mmap.mmap(file.fileno(), max(end, 1))
    return {name: _view(pages, offsets[name], tensor) for name, tensor in tensors.items()}


def _view(pages: mmap.mmap, offset: int, like: Tensor) -> Tensor:
    if not like.nbytes:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")
    data = torch.frombuffer(pages, dtype=torch.uint8, count=like.nbytes, offset=offset)
    return data.view(like.dtype).view(like.shape)
