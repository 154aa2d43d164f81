"""Checkpoints of a run: step folders below a root, of which one is always whole."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from functools import partial
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from fairshard.checkpoint.agreement import idle_group, occupy, on_all_ranks, rank_in
from fairshard.checkpoint.contents import LATEST
from fairshard.checkpoint.entries import Stateful, Training
from fairshard.checkpoint.loading import load
from fairshard.checkpoint.saving import Draft, not_saved, take, write
from fairshard.checkpoint.snapshot import Buffers
from fairshard.checkpoint.storage import MANIFEST, TEMPORARY, full_path, storage_of
from fairshard.errors import CheckpointError

_log = logging.getLogger("fairshard")

_STEP = re.compile(r"step-(\d{8,})")
_REPLACED = ".replaced-"
"""A whole checkpoint under this name makes way for another one of its step."""
_REMOVED = ".old-"
"""What is under this name is being removed, and no longer whole."""


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

    After the last save call `wait`, before the process group is destroyed; or use it as a context manager.

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
        self.root = full_path(root)
        self.every = every
        self.keep_last = keep_last
        self.async_save = async_save
        self._storage = storage_of(self.root)
        self._buffers: Buffers = {}
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
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
        if type(step) is not int or step < 0:
            raise ValueError(f"`step` must be a number of steps, but is {step!r}.")
        group = idle_group()
        training = Training(model, optimizer, scheduler, scaler, extra)
        draft = take(training, step, self._buffers if self.async_save else None)
        if not self.async_save:
            self._write(draft, group)
            self.wait()
            return
        self._thread = threading.Thread(target=self._write, args=(draft, group), name="fairshard checkpoint")
        occupy(group, self._thread)
        self._thread.start()

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
        group = idle_group()
        folder: str | None = on_all_ranks(group, lambda: self._newest() if rank_in(group) == 0 else None)[0]
        if folder is None:
            return None
        return self._load(folder, Training(model, optimizer, scheduler, scaler, extra))

    def load_step(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        extra: dict[str, Any] | Stateful | None = None,
    ) -> int:
        """Load the checkpoint of ``step``, as `fairshard.checkpoint.load`; returns the step. **Collective.**

        Raises:
            CheckpointError: on every rank, if there is none, or if it is damaged.
        """
        self.wait()
        self._load(f"{self.root}/{step_name(step)}", Training(model, optimizer, scheduler, scaler, extra))
        return step

    def _load(self, folder: str, training: Training) -> int | None:
        try:
            return load(folder, **vars(training))
        except CheckpointError as error:
            others = [f"{self.root}/{name}" for name in self._whole_names() if not folder.endswith(name)]
            cure = f" There are also {', '.join(others)}." if others else ""
            raise CheckpointError(f"{error}{cure}") from error

    def wait(self) -> None:
        """Wait for the save in the background, if any.

        Raises:
            CheckpointError: it failed; the checkpoints before it are as they were.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
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

    def _write(self, draft: Draft, group: ProcessGroup | None) -> None:
        folder = f"{self.root}/{step_name(draft.step or 0)}"
        try:
            self._clean(group)
            write(draft, folder, group, partial(self._make_way, folder))
            on_all_ranks(group, lambda: self._point(folder) if rank_in(group) == 0 else None)
        except CheckpointError as error:
            self._fail(error, group)
        except Exception as error:
            self._fail(not_saved(folder, error, group), group)
        finally:
            draft.snapshot.close()

    def _fail(self, failure: CheckpointError, group: ProcessGroup | None) -> None:
        self._failure = failure
        if rank_in(group) == 0:
            _log.error("%s", failure)  # there may be no next call that could raise it
            with contextlib.suppress(OSError):
                self._settle_replaced()

    def _clean(self, group: Any) -> None:
        """Remove what saves that were killed have left."""
        if not self._has_cleaned:
            self._has_cleaned = True
            on_all_ranks(group, lambda: self._remove_leftovers() if rank_in(group) == 0 else None)

    def _remove_leftovers(self) -> None:
        self._settle_replaced()
        for name in self._storage.names(self.root):
            if name.startswith((TEMPORARY, _REMOVED)):
                self._storage.remove(f"{self.root}/{name}")

    def _make_way(self, folder: str) -> None:
        """Move a checkpoint of the same step, of a run that was resumed from an earlier one, out of the way."""
        if not self._storage.is_free(folder):
            name = folder.rpartition("/")[2]
            self._storage.publish(folder, f"{self.root}/{_REPLACED}{name}")

    def _settle_replaced(self) -> None:
        """Drop the checkpoints that have made way for new ones; where the new one did not come, put the old one back.

        *Invariant*: of a step that is saved again one checkpoint is whole at any time, under one of the two names.
        """
        for name in self._storage.names(self.root):
            if name.startswith(_REPLACED):
                step = name.removeprefix(_REPLACED)
                if self._is_whole(step) or not self._is_whole(name):
                    self._discard(f"{self.root}/{name}")
                else:
                    self._storage.remove(f"{self.root}/{step}")
                    self._storage.publish(f"{self.root}/{name}", f"{self.root}/{step}")

    def _point(self, folder: str) -> None:
        """Name the newest checkpoint, which is durable now, and drop the oldest."""
        name = folder.rpartition("/")[2]
        pointer = f"{self.root}/{LATEST}"
        try:
            self._storage.replace_text(pointer, f"{name}\n")
        except OSError as error:
            raise CheckpointError(
                f"{folder} is saved, but {pointer} does not name it: {error.strerror}. Runs resume from the one before."
            ) from error
        self._settle_replaced()
        names = self._whole_names()
        for old in names[: names.index(name) + 1][: -self.keep_last]:  # later ones are of a run that was left
            self._discard(f"{self.root}/{old}")

    def _discard(self, folder: str) -> None:
        self._storage.discard(folder, f"{self.root}/{_REMOVED}{folder.rpartition('/')[2]}")

    def _newest(self) -> str | None:
        """The folder that ``latest`` names. A crash before the first ``latest`` leaves none: then the newest whole one.

        Raises:
            CheckpointError: ``latest`` is damaged, or what it names is not whole.
        """
        with contextlib.suppress(OSError):  # the folder may be one that is only read
            self._settle_replaced()
        names = self._whole_names()
        pointer = f"{self.root}/{LATEST}"
        if not self._storage.exists(pointer):
            return f"{self.root}/{names[-1]}" if names else None
        try:
            named = self._storage.read_text(pointer).strip()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{pointer} must name a checkpoint, but cannot be read: {error}.") from error
        if named not in names:
            problem = f"{self.root}/{named}/{MANIFEST} is missing" if _STEP.fullmatch(named) else "it is damaged"
            whole = f"one of {', '.join(names)}" if names else "another one, for no whole one is left"
            raise CheckpointError(
                f"{pointer} must name a whole checkpoint, but says {named!r}, and {problem}. Write into it {whole}."
            )
        return f"{self.root}/{named}"

    def _whole_names(self) -> list[str]:
        """Names of the step folders with a manifest, oldest first."""
        steps = [name for name in self._storage.names(self.root) if _STEP.fullmatch(name)]
        return sorted(filter(self._is_whole, steps), key=lambda name: int(name.removeprefix("step-")))

    def _is_whole(self, name: str) -> bool:
        return self._storage.exists(f"{self.root}/{name}/{MANIFEST}")
