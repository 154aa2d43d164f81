"""What the offline tools write: a new file or folder, there whole or not at all; and memory that is not memory."""

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
from fairshard.checkpoint.storage import LocalStorage
from fairshard.errors import CheckpointError

_ALIGNMENT = 64


class NewOutput:
    """A folder to work in, beside ``out`` on the same disk; ``publish`` makes it, or a file in it, ``out``.

    At the end of the ``with`` block the work folder is gone, whatever happened. An OSError inside becomes a
    CheckpointError that names ``out``.

    Raises:
        CheckpointError: there is something at ``out``, or no folder to put it in.
    """

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self.out = Path(out)
        self.work = self.out.parent / f"{self.out.name}.tmp-{os.getpid()}"
        self._storage = LocalStorage()
        self._check()

    def publish(self, name: str | None = None) -> None:
        """Sync all files, then give the work folder, or the file ``name`` in it, the name ``out``."""
        for file in self.work.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        self._check()
        self._storage.publish(str(self.work / name if name else self.work), str(self.out))

    def _check(self) -> None:
        if os.path.lexists(self.out):
            raise CheckpointError(f"{self.out} exists, and nothing is overwritten. Pass a new name, or remove it.")
        if not self.out.parent.is_dir():
            raise CheckpointError(f"{self.out} needs a folder to lie in, but {self.out.parent} is none. Make it first.")

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
    """Empty tensors like ``tensors`` (which may be on the meta device), each with a storage of its own.

    Their memory is a file in ``folder`` that has no name any more: the kernel writes its pages back when it needs
    the room, so that what is larger than memory fits, and frees the space when the last of the tensors is gone. The
    space is taken now: a full disk is an OSError here, not a SIGBUS at the first write.
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
        return torch.empty(like.shape, dtype=like.dtype)
    data = torch.frombuffer(pages, dtype=torch.uint8, count=like.nbytes, offset=offset)
    return data.view(like.dtype).view(like.shape)
