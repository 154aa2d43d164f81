"""Checkpoints of a run: step folders below a root, of which one is always whole."""

from __future__ import annotations

import os
import re
import threading
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fairshard.checkpoint.agreement import on_all_ranks, rank_in
from fairshard.checkpoint.contents import LATEST
from fairshard.checkpoint.entries import Stateful, Training
from fairshard.checkpoint.loading import load
from fairshard.checkpoint.manifest import read_manifest
from fairshard.checkpoint.saving import TEMPORARY, Draft, take, write
from fairshard.checkpoint.snapshot import Buffers
from fairshard.checkpoint.storage import MANIFEST, storage_of
from fairshard.errors import CheckpointError
from fairshard.utils.collectives import host_group

_STEP = re.compile(r"step-(\d{8,})")
_REPLACED = ".old-"


def step_name(step: int) -> str:
    """The name of the folder of a step."""
    return f"step-{step:08}"


class Checkpointer:
    """Saves every so many steps below ``root``, keeps the last few, and resumes from the newest that is whole.

    A step folder gets its name when all of it is on the disk; then ``latest`` is pointed at it; then older ones are
    removed. Whenever a rank is killed, ``latest`` names a whole checkpoint.

    With ``async_save`` training is held only while tensors are copied to host memory, and a thread writes. Masters
    in host memory (``cpu_offload``) are not even copied, unless the next step comes before they are written. Two saves
    never run at once: the next waits for the last. What a background save raised is raised by the next call.

    Args:
        root: a folder, or a URL that fsspec knows. All ranks must see the same.
        every: save at the steps that this divides.
        keep_last: how many checkpoints to keep.
        async_save: write in the background.

    Raises:
        ValueError: ``every`` or ``keep_last`` is below 1.
    """

    def __init__(
        self, root: str | os.PathLike[str], *, every: int = 100, keep_last: int = 3, async_save: bool = True
    ) -> None:
        for name, value in (("every", every), ("keep_last", keep_last)):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, but is {value}.")
        self.root = os.fspath(root).rstrip("/")
        self.every = every
        self.keep_last = keep_last
        self.async_save = async_save
        self._storage = storage_of(self.root)
        self._buffers: Buffers = {}
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._has_cleaned = False

    def maybe_save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        extra: dict[str, Any] | Stateful | None = None,
    ) -> bool:
        """`save` if ``every`` divides ``step``; whether it did. **Collective** then."""
        if step % self.every:
            return False
        self.save(step, model, optimizer, scheduler, scaler, extra)
        return True

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        extra: dict[str, Any] | Stateful | None = None,
    ) -> None:
        """Save what `fairshard.checkpoint.save` does, as the checkpoint of ``step``. **Collective.**

        Raises:
            CheckpointError: on every rank; also what the last save in the background raised.
            TypeError: on every rank, if something could not be read back as plain data.
        """
        self.wait()
        group = host_group()
        training = Training(model, optimizer, scheduler, scaler, extra)
        draft = take(training, step, self._buffers if self.async_save else None)
        self._thread = threading.Thread(target=self._write, args=(draft, group), name="fairshard checkpoint")
        self._thread.start()
        if not self.async_save:
            self.wait()

    def load_latest(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        extra: dict[str, Any] | Stateful | None = None,
    ) -> int | None:
        """Load the newest whole checkpoint, as `fairshard.checkpoint.load`; its step, None if there is none.

        **Collective.**

        Raises:
            CheckpointError: on every rank, if it is damaged; the message names the others that there are.
        """
        self.wait()
        folder: str | None = on_all_ranks(host_group(), self._newest)[0]
        if folder is None:
            return None
        try:
            return load(folder, model, optimizer, scheduler, scaler, extra)
        except CheckpointError as error:
            others = [f"{self.root}/{name}" for name in self._whole_names() if not folder.endswith(name)]
            cure = f" There are also {', '.join(others)}." if others else ""
            raise CheckpointError(f"{error}{cure}") from error

    def wait(self) -> None:
        """Wait for the save in the background, if any.

        Raises:
            CheckpointError: it failed; the checkpoints before it are as they were.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.wait()
        elif self._thread is not None:
            self._thread.join()

    # ---- private

    def _write(self, draft: Draft, group: Any) -> None:
        try:
            self._clean(group)
            folder = f"{self.root}/{step_name(draft.step or 0)}"
            write(draft, folder, group, partial(self._make_way, folder))
            on_all_ranks(group, lambda: self._point(folder) if rank_in(group) == 0 else None)
        except BaseException as error:  # raised by the next call
            self._failure = error
        finally:
            draft.snapshot.close()

    def _clean(self, group: Any) -> None:
        """Remove what saves that were killed have left."""
        if not self._has_cleaned:
            self._has_cleaned = True
            on_all_ranks(group, lambda: self._remove_leftovers() if rank_in(group) == 0 else None)

    def _remove_leftovers(self) -> None:
        for name in self._storage.names(self.root):
            if name.startswith((TEMPORARY, _REPLACED)):
                self._storage.remove(f"{self.root}/{name}")

    def _make_way(self, folder: str) -> None:
        """Move a checkpoint of the same step, of a run that was resumed from an earlier one, out of the way."""
        if not self._storage.is_free(folder):
            self._discard(folder)

    def _point(self, folder: str) -> None:
        """Name the newest checkpoint, which is durable now, and drop the oldest."""
        name = folder.rpartition("/")[2]
        self._storage.replace_text(f"{self.root}/{LATEST}", f"{name}\n")
        for old in self._whole_names()[: -self.keep_last]:
            if old != name:
                self._discard(f"{self.root}/{old}")

    def _discard(self, folder: str) -> None:
        """Remove a checkpoint; at no time does half of it stand under its name."""
        aside = f"{self.root}/{_REPLACED}{folder.rpartition('/')[2]}"
        self._storage.remove(aside)
        self._storage.publish(folder, aside)
        self._storage.remove(aside)

    def _newest(self) -> str | None:
        """The folder that ``latest`` names; where that is gone, the newest that is whole."""
        names = self._whole_names()
        pointer = f"{self.root}/{LATEST}"
        if self._storage.exists(pointer):
            named = self._storage.read_text(pointer).strip()
            if named in names:
                return f"{self.root}/{named}"
        return f"{self.root}/{names[-1]}" if names else None

    def _whole_names(self) -> list[str]:
        """Names of the step folders with a manifest, oldest first."""
        steps = [name for name in self._storage.names(self.root) if _STEP.fullmatch(name)]
        whole = [name for name in steps if self._storage.exists(f"{self.root}/{name}/{MANIFEST}")]
        return sorted(whole, key=lambda name: int(name.removeprefix("step-")))


def read_step(folder: str) -> int | None:
    """The step that a checkpoint was saved at."""
    manifest = read_manifest(storage_of(folder), folder)
    return None if manifest is None else manifest.step
