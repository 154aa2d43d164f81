"""A run's claim on the folder of its checkpoints: rank 0 holds the lock, and all ranks know whether it does."""

from __future__ import annotations

import time
from collections.abc import Callable

from fairshard.checkpoint.agreement import idle_group, on_all_ranks, rank_in
from fairshard.checkpoint.run_lock import Owner, RunLock, leave_with, lock_of
from fairshard.checkpoint.storage import is_remote

_POLL_S = 0.5


class Claim:
    """The claim of all ranks on ``root``. It ends with `leave`, with this object, or with the process."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._lock: RunLock | None = None
        self._is_taken = is_remote(root)  # fsspec has no operation that is exclusive everywhere
        self._leave: Callable[[], object] = lambda: None

    def take(self) -> None:
        """Take the lock, unless the run has it. **Collective** the first time.

        Raises:
            CheckpointError: on every rank, if another run has it.
        """
        if self._is_taken:
            return
        group = idle_group()
        while (found := on_all_ranks(group, lambda: self._poll() if rank_in(group) == 0 else None)[0]) is False:
            time.sleep(_POLL_S)
        self._is_taken = found is True

    def check(self) -> None:
        """Raise on rank 0 if another run has taken the lock meanwhile.

        Raises:
            CheckpointError: it has.
        """
        if self._lock is not None:
            self._lock.check()

    def other(self) -> Owner | None:
        """Another run that has the lock and is known to live."""
        return None if is_remote(self._root) else lock_of(self._root).other()

    def leave(self) -> None:
        """Give the folder free; a later save takes it again."""
        self._leave()
        self._lock, self._is_taken = None, is_remote(self._root)

    def _poll(self) -> bool | None:
        """Whether this process has the lock now; None if the folder cannot be written, which a save then reports."""
        lock = lock_of(self._root)
        try:
            if not lock.poll():
                return False
        except OSError:
            return None
        self._lock = lock
        self._leave = leave_with(self, lock)
        return True
