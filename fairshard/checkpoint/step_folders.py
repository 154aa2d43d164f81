"""The folders of a run's checkpoints: which is newest, which are whole, and what killed saves have left."""

from __future__ import annotations

import contextlib
import logging
import re

from fairshard.checkpoint.claim import Claim
from fairshard.checkpoint.contents import LATEST, MAX_POINTER_NBYTES, check_ours
from fairshard.checkpoint.step_names import STEP, step_of
from fairshard.checkpoint.storage import MANIFEST, storage_of
from fairshard.errors import CheckpointError

_log = logging.getLogger("fairshard")

_REPLACED = ".replaced-"
"""Prefix of a whole checkpoint that is being replaced by another of the same step."""
_REMOVED = ".old-"
"""Prefix of a checkpoint that is being removed, and may no longer be whole."""
_LEFTOVER = re.compile(r"\.tmp-(step-\d{8,}-[0-9a-f]+|latest-\d+)|\.old-(\.replaced-)?step-\d{8,}")
"""Names of what killed saves leave; other files in the root are not ours."""


class StepFolders:
    """The folders below ``root``, which the run of ``claim`` uses; only rank 0 changes them."""

    def __init__(self, root: str, claim: Claim) -> None:
        self.root = root
        self._claim = claim
        self._storage = storage_of(root)
        self._kept: set[str] = set()  # folders that are not removed, because they hold what is not ours

    def remove_leftovers(self) -> None:
        """Remove what killed saves have left."""
        self.resolve_replaced()
        for name in self._storage.names(self.root):
            if _LEFTOVER.fullmatch(name):
                self._storage.remove(f"{self.root}/{name}")

    def set_aside(self, folder: str) -> None:
        """Rename an existing checkpoint of the same step: a run resumed from an earlier step saves that step again."""
        self._claim.check()
        if not self._storage.is_free(folder):
            check_ours(self._storage, folder)
            name = folder.rpartition("/")[2]
            self._storage.publish(folder, f"{self.root}/{_REPLACED}{name}")

    def resolve_replaced(self) -> None:
        """Remove each checkpoint that was set aside if its replacement is whole; otherwise restore it.

        *Invariant*: a step that is saved again always has a whole checkpoint, under one of the two names.
        """
        for name in self._storage.names(self.root):
            step = name.removeprefix(_REPLACED)
            if name != step and STEP.fullmatch(step):
                if self._is_whole(step) or not self._is_whole(name):
                    self._discard(f"{self.root}/{name}")
                else:
                    self._storage.remove(f"{self.root}/{step}")
                    self._storage.publish(f"{self.root}/{name}", f"{self.root}/{step}")

    def point(self, folder: str, keep_last: int) -> None:
        """Point ``latest`` at the newest checkpoint, which is durable now, and remove all but ``keep_last``."""
        name = folder.rpartition("/")[2]
        pointer = f"{self.root}/{LATEST}"
        try:
            self._storage.replace_text(pointer, f"{name}\n")
        except OSError as error:
            raise CheckpointError(
                f"{folder} is saved, but {pointer} does not name it: {error.strerror}. Runs resume from "
                "the previous one."
            ) from error
        self.resolve_replaced()
        names = self.whole_names()
        for old in names[: names.index(name) + 1][:-keep_last]:  # later ones belong to an abandoned run
            self._discard(f"{self.root}/{old}")

    def newest(self) -> str | None:
        """The folder that ``latest`` names; without ``latest`` (a crash in the first save), the newest whole one.

        Raises:
            CheckpointError: ``latest`` is damaged, or the checkpoint that it names is not whole.
        """
        if self._claim.other() is None:
            with contextlib.suppress(OSError):  # the folder may be read-only
                self.resolve_replaced()
        names = self.whole_names()
        pointer = f"{self.root}/{LATEST}"
        if not self._storage.exists(pointer):
            return f"{self.root}/{names[-1]}" if names else None
        try:
            named = self._storage.read_text(pointer, MAX_POINTER_NBYTES).strip()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{pointer} must name a checkpoint, but cannot be read: {error}.") from error
        if named not in names:
            problem = f"{self.root}/{named}/{MANIFEST} is missing" if STEP.fullmatch(named) else "it is damaged"
            cure = f"Write one of {', '.join(names)} into it" if names else "No whole checkpoint is left"
            raise CheckpointError(f"{pointer} must name a whole checkpoint, but says {named!r}, and {problem}. {cure}.")
        return f"{self.root}/{named}"

    def whole_names(self) -> list[str]:
        """Names of the step folders with a manifest, oldest first."""
        steps = [name for name in self._storage.names(self.root) if STEP.fullmatch(name)]
        return sorted(filter(self._is_whole, steps), key=step_of)

    def _discard(self, folder: str) -> None:
        """Remove a checkpoint, unless it holds what fairshard did not write."""
        try:
            check_ours(self._storage, folder)
        except CheckpointError as error:
            if folder not in self._kept:
                _log.warning("%s is kept: %s", folder, error)
            self._kept.add(folder)
            return
        self._storage.discard(folder, f"{self.root}/{_REMOVED}{folder.rpartition('/')[2]}")

    def _is_whole(self, name: str) -> bool:
        return self._storage.exists(f"{self.root}/{name}/{MANIFEST}")
