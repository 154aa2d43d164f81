"""The folders of a run's checkpoints: which is newest, which are whole, and what killed saves have left."""

from __future__ import annotations

import contextlib
import logging
import re
import weakref
from collections.abc import Callable

from fairshard.checkpoint.contents import LATEST, read_pointer
from fairshard.checkpoint.manifest import read_manifest
from fairshard.checkpoint.run_lock import RunLock, lock_of
from fairshard.checkpoint.storage import MANIFEST, is_remote, storage_of
from fairshard.errors import CheckpointError

_log = logging.getLogger("fairshard")

_STEP = re.compile(r"step-(\d{8,})")
_REPLACED = ".replaced-"
"""Prefix of a whole checkpoint that is being replaced by another of the same step."""
_REMOVED = ".old-"
"""Prefix of a checkpoint that is being removed, and may no longer be whole."""
_LEFTOVER = re.compile(r"\.tmp-(step-\d{8,}-[0-9a-f]+|latest-\d+)|\.old-(\.replaced-)?step-\d{8,}")
"""Names of what killed saves leave; other files in the root are not ours."""


def step_name(step: int) -> str:
    """The name of the folder of a step."""
    return f"step-{step:08}"


def check_step(step: int) -> None:
    """Raise unless ``step`` is a number of steps.

    Raises:
        ValueError: it is not.
    """
    if type(step) is not int or step < 0:
        raise ValueError(f"`step` must be a number of steps, but is {step!r}.")


class StepFolders:
    """The folders below ``root``; only rank 0 changes them, once it has the lock."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._storage = storage_of(root)
        self._kept: set[str] = set()  # folders that are not removed, because they hold what is not ours
        self._lock: RunLock | None = None
        self._leave: Callable[[], object] = lambda: None

    def poll(self) -> bool | None:
        """Whether this process has the lock now; None if the folder cannot be written, which a save then reports.

        With the lock, what killed saves have left is removed.

        fsspec has no operation that is exclusive everywhere: there are no locks there. A lock that was taken is left
        with `leave`, with this object, or with the process.

        Raises:
            CheckpointError: another run has it.
        """
        if not is_remote(self.root):
            lock = lock_of(self.root)
            try:
                if not lock.poll():
                    return False
            except OSError:
                return None
            self._lock, self._leave = lock, weakref.finalize(self, lock.leave)
        self._remove_leftovers()
        return True

    def leave(self) -> None:
        """Give the folder free."""
        self._leave()
        self._lock = None

    def set_aside(self, folder: str) -> None:
        """Rename an existing checkpoint of the same step: a run resumed from an earlier step saves that step again."""
        if self._lock is not None:
            self._lock.check()
        if not self._storage.is_free(folder):
            self._check_ours(folder)
            name = folder.rpartition("/")[2]
            self._storage.publish(folder, f"{self.root}/{_REPLACED}{name}")

    def resolve_replaced(self) -> None:
        """Remove each checkpoint that was set aside if its replacement is whole; otherwise restore it.

        *Invariant*: a step that is saved again always has a whole checkpoint, under one of the two names.
        """
        for name in self._storage.names(self.root):
            step = name.removeprefix(_REPLACED)
            if name != step and _STEP.fullmatch(step):
                if self._is_whole(step) or not self._is_whole(name):
                    self._storage.discard(f"{self.root}/{name}", f"{self.root}/{_REMOVED}{name}")
                else:
                    self._storage.remove(f"{self.root}/{step}")
                    self._storage.publish(f"{self.root}/{name}", f"{self.root}/{step}")

    def point(self, name: str, keep_last: int) -> None:
        """Point ``latest`` at the newest checkpoint, which is durable now, and remove all but ``keep_last``."""
        pointer = f"{self.root}/{LATEST}"
        try:
            self._storage.replace_text(pointer, f"{name}\n")
        except OSError as error:
            raise CheckpointError(
                f"{self.root}/{name} is saved, but {pointer} does not name it: {error.strerror}. Runs resume from "
                "the previous one."
            ) from error
        self.resolve_replaced()
        names = self.whole_names()
        for old in names[: names.index(name) + 1][:-keep_last]:  # later ones belong to an abandoned run
            self._discard(old)

    def newest(self) -> str | None:
        """The folder that ``latest`` names; without ``latest`` (a crash in the first save), the newest whole one.

        Raises:
            CheckpointError: ``latest`` is damaged, or the checkpoint that it names is not whole.
        """
        if is_remote(self.root) or lock_of(self.root).other() is None:
            with contextlib.suppress(OSError):  # the folder may be read-only
                self.resolve_replaced()
        names, pointer = self.whole_names(), f"{self.root}/{LATEST}"
        if not self._storage.exists(pointer):
            return f"{self.root}/{names[-1]}" if names else None
        named = read_pointer(self._storage, pointer)
        if named not in names:
            problem = f"{self.root}/{named}/{MANIFEST} is missing" if _STEP.fullmatch(named) else "it is damaged"
            cure = f"Write one of {', '.join(names)} into it" if names else "No whole checkpoint is left"
            raise CheckpointError(f"{pointer} must name a whole checkpoint, but says {named!r}, and {problem}. {cure}.")
        return f"{self.root}/{named}"

    def whole_names(self) -> list[str]:
        """Names of the step folders with a manifest, oldest first."""
        steps = [name for name in self._storage.names(self.root) if _STEP.fullmatch(name)]
        return sorted(filter(self._is_whole, steps), key=lambda name: int(name.removeprefix("step-")))

    def _remove_leftovers(self) -> None:
        self.resolve_replaced()
        for name in self._storage.names(self.root):
            if _LEFTOVER.fullmatch(name):
                self._storage.remove(f"{self.root}/{name}")

    def _check_ours(self, folder: str) -> None:
        """Check that ``folder`` holds a checkpoint of fairshard and nothing else, so that it may be moved or removed.

        Raises:
            CheckpointError: it does not.
        """
        manifest = read_manifest(self._storage, folder)
        if manifest is None:
            problem = f"has no {MANIFEST}"
        elif others := set(self._storage.names(folder)) - manifest.files.keys() - {MANIFEST}:
            problem = f"also has {min(others)}"
        else:
            return
        raise CheckpointError(f"Only what fairshard wrote may be replaced or removed, but {folder} {problem}. Move it.")

    def _discard(self, name: str) -> None:
        """Remove a checkpoint, unless it holds what fairshard did not write."""
        folder = f"{self.root}/{name}"
        try:
            self._check_ours(folder)
        except CheckpointError as error:
            if folder not in self._kept:
                _log.warning("%s is kept: %s", folder, error)
            self._kept.add(folder)
            return
        self._storage.discard(folder, f"{self.root}/{_REMOVED}{name}")

    def _is_whole(self, name: str) -> bool:
        return self._storage.exists(f"{self.root}/{name}/{MANIFEST}")
