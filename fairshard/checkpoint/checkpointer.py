"""Checkpoints of a run: step folders below a root; at least one is always whole."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from functools import partial
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from fairshard.checkpoint.agreement import await_writer, idle_group, on_all_ranks, on_first_rank, rank_in, start_writer
from fairshard.checkpoint.entries import Stateful, Training
from fairshard.checkpoint.loading import load_training
from fairshard.checkpoint.preemption import Preempted, Preemption
from fairshard.checkpoint.saving import Draft, not_saved, take, write
from fairshard.checkpoint.snapshot import Buffers
from fairshard.checkpoint.step_folders import StepFolders, check_step, step_name
from fairshard.checkpoint.storage import full_path
from fairshard.checks.watchdog import watch
from fairshard.errors import CheckpointError, CollectiveFailedError, FairshardError
from fairshard.utils.keywords import named_keywords

_log = logging.getLogger("fairshard")

_POLL_S = 0.5
_NO_COPIES = (
    "It was removed in fairshard 0.7: save more often with a second Checkpointer, whose root is a folder in memory, "
    'such as Checkpointer("/dev/shm/run", every=5, keep_last=1), and load the newer of the two.'
)


class Checkpointer:
    """Saves periodically below ``root``, keeps the last checkpoints, and resumes from the newest whole one.

    A step folder gets its name once all of it is on the disk; then ``latest`` is updated to name it; then older
    checkpoints are removed. A rank may be killed at any time: ``latest`` still names a whole checkpoint.

    With ``async_save`` training waits only while tensors are copied to host memory; a thread writes them. Masters in
    host memory (``cpu_offload``) are copied only if the next step starts before they are written. Saves never overlap:
    each waits for the previous one. If a background save fails, the next call raises its error.

    At the end call `close` before the process group is destroyed, or use the object as a context manager.

    Only one run at a time may write below ``root``: the first save takes a lock, and raises if another process has it
    (``run_lock.py``; not through fsspec). `load_latest` and `load_step` need no lock.

    Args:
        root: a folder, or a URL that fsspec supports. All ranks must see the same folder.
        every: save at multiples of this step.
        keep_last: number of checkpoints to keep.
        async_save: write in the background.

    Raises:
        ValueError: ``every`` or ``keep_last`` is below 1.

    Attributes:
        preemption: asked by `maybe_save` whether to stop; see `on_preemption`.
    """

    @named_keywords("Checkpointer", dict.fromkeys(("memory_every", "memory_folder"), _NO_COPIES))
    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        every: int = 100,
        keep_last: int = 3,
        async_save: bool = True,
    ) -> None:
        for name, value in (("every", every), ("keep_last", keep_last)):
            if not isinstance(value, int):
                raise TypeError(f"`{name}` must be a number of steps, but is {value!r}.")
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, but is {value}.")
        watch()
        self.root = full_path(root)
        self.every = every
        self.keep_last = keep_last
        self.async_save = async_save
        self.preemption: Preemption | None = None
        self._folders = StepFolders(self.root)
        self._buffers: Buffers = {}
        self._thread: threading.Thread | None = None
        self._failure: FairshardError | None = None
        self._is_compared = False
        self._is_locked = False

    def lock(self) -> None:
        """Take the folder for this run, as the first save does. **Collective.** May wait 30 s for a dead host.

        Raises:
            CheckpointError: on every rank, if another run uses the folder.
            ValueError: on every rank, if the checkpointers of the ranks differ.
        """
        self._compare()
        group = idle_group()
        while not self._is_locked:
            found = on_first_rank(group, self._folders.poll)
            if found is None:  # the save reports why
                return
            self._is_locked = found
            time.sleep(0 if found else _POLL_S)

    def maybe_save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        extra: dict[str, Any] | Stateful | None = None,
    ) -> bool:
        """`save` if ``every`` divides ``step``; returns whether it did. **Collective**: call it after every step.

        Raises:
            Preempted: on every rank, once the step is saved, if a signal asked for it; see `on_preemption`.
            TypeError: ``step`` is no number.
            ValueError: on every rank, in the first call, if ranks differ in ``every``.
        """
        if not hasattr(step, "__index__"):
            raise TypeError(
                f"`step` must be a number of steps, but is {type(step).__name__}. Call `maybe_save(step, model, "
                "optimizer)`."
            )
        self.lock()
        is_last = self.preemption is not None and self.preemption.is_due()
        if step % self.every and not is_last:
            return False
        self.save(step, model, optimizer, scheduler, scaler, extra)
        if is_last:
            self.close()
            raise Preempted(step)
        return True

    def _compare(self) -> None:
        """Check once that all ranks use one folder and save at the same steps. **Collective.**"""
        if self._is_compared:
            return
        found = on_all_ranks(idle_group(), lambda: (("root", self.root), ("every", self.every)))
        for rank, others in enumerate(found):
            for (name, value), (_, first) in zip(others, found[0], strict=True):
                if value != first:
                    raise ValueError(
                        f"`{name}` of a Checkpointer must be the same on all ranks, but is {first} on rank 0 "
                        f"and {value} on rank {rank} of {len(found)}. Pass the same on every rank."
                    )
        self._is_compared = True

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        extra: dict[str, Any] | Stateful | None = None,
    ) -> None:
        """Save the checkpoint of ``step``, as `fairshard.checkpoint.save` does. **Collective.**

        Raises:
            CheckpointError: on every rank; also the error of the last background save.
            CollectiveFailedError: a rank has ended, is stopped, or does something else.
            TypeError: on every rank, if a value could not be read back as plain data.
        """
        self.wait()
        check_step(step)
        self.lock()
        group = idle_group()
        training = Training(model, optimizer, scheduler, scaler, extra)
        draft = take(training, step, self._buffers if self.async_save else None)
        writing = partial(self._write, draft, group)
        if self.async_save:
            self._thread = start_writer(f"a save of {self.root}/{step_name(step)}", writing, group)
        else:
            writing()
            self.wait()

    def load_latest(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        extra: dict[str, Any] | Stateful | None = None,
        *,
        verify: str = "reading",
    ) -> int | None:
        """Load the newest whole checkpoint with `fairshard.checkpoint.load`; returns its step, None if not found.

        **Collective.** ``verify``: see there.

        Raises:
            CheckpointError: on every rank, if it is damaged; the message names the other checkpoints.
        """
        self.wait()
        self._compare()
        group = idle_group()
        training = Training(model, optimizer, scheduler, scaler, extra)
        newest = on_first_rank(group, self._folders.newest)
        return None if newest is None else self._load(newest, training)

    def load_step(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        extra: dict[str, Any] | Stateful | None = None,
        *,
        verify: str = "reading",
    ) -> int:
        """Load the checkpoint of ``step`` with `fairshard.checkpoint.load`; returns the step. **Collective.**

        ``verify``: see there. The step is that of the manifest: a folder that was renamed is refused.

        Raises:
            CheckpointError: on every rank, if it is missing or damaged, or of another step.
        """
        self.wait()
        training = Training(model, optimizer, scheduler, scaler, extra)
        self._load(f"{self.root}/{step_name(step)}", training, step)
        return step

    def _load(self, folder: str, training: Training, step: int | None = None) -> int | None:
        try:
            return load_training(folder, training, step=step)
        except CheckpointError as error:
            others = [f"{self.root}/{name}" for name in self._folders.whole_names() if not folder.endswith(name)]
            cure = f" Other checkpoints: {', '.join(others)}." if others else ""
            raise CheckpointError(f"{error}{cure}") from error

    def wait(self) -> None:
        """Wait for the background save, if any.

        Raises:
            CheckpointError: the save failed; earlier checkpoints are unchanged.
            CollectiveFailedError: it failed because a rank has ended or is stopped.
        """
        if self._thread is not None:
            await_writer(self._thread)
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """`wait`, then give the folder free for other runs.

        Raises:
            CheckpointError: the last save failed; earlier checkpoints are unchanged.
        """
        try:
            self.wait()
        finally:
            self._free()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(FairshardError):  # the error that ends the block says more
            self.wait()
        self._free()

    # ---- private

    def _free(self) -> None:
        self._is_locked = False
        self._folders.leave()

    def _write(self, draft: Draft, group: ProcessGroup | None) -> None:
        name = step_name(draft.step or 0)
        folder = f"{self.root}/{name}"
        try:
            write(draft, folder, group, partial(self._folders.set_aside, folder))
            on_first_rank(group, lambda: self._folders.point(name, self.keep_last))
        except (CheckpointError, CollectiveFailedError) as error:
            self._fail(error, group)
        except Exception as error:  # of any kind: nobody else would see it
            self._fail(not_saved(folder, error, group), group)
        finally:
            draft.snapshot.close()

    def _fail(self, failure: FairshardError, group: ProcessGroup | None) -> None:
        self._failure = failure
        if rank_in(group) == 0:
            _log.error("%s", failure)  # there may be no next call to raise it
            with contextlib.suppress(OSError):
                self._folders.resolve_replaced()
