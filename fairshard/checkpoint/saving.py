"""Writing one checkpoint atomically: it appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from fairshard.checkpoint.agreement import described, failure_of, idle_group, on_all_ranks, rank_in
from fairshard.checkpoint.entries import (
    Stateful,
    Training,
    add_own_values,
    aliases_of,
    live_storages,
    model_entries,
    object_entries,
    replicated_sums,
)
from fairshard.checkpoint.manifest import FileEntry, Manifest
from fairshard.checkpoint.pieces import Piece, check_shared, shared_by_few
from fairshard.checkpoint.snapshot import Buffers, Snapshot
from fairshard.checkpoint.step_names import check_step
from fairshard.checkpoint.storage import MANIFEST, TEMPORARY, Storage, full_path, storage_of
from fairshard.checkpoint.writer import CheckpointWriter, SnapshotPlanner
from fairshard.checks.histories import Histories, check_histories, histories
from fairshard.errors import CheckpointError, CollectiveFailedError, FairshardError, RanksDisagreeError
from fairshard.state.optim_gathering import GatheredOptimState, problem_among, problem_of_places
from fairshard.state.optim_params import OptimParams
from fairshard.utils.collectives import Communicator, gather_objects
from fairshard.utils.collector import collector_paused
from fairshard.utils.failures import explained

_filters = threading.Lock()
"""Held while a thread ignores warnings."""


@dataclass
class Draft:
    """A checkpoint to write: a snapshot taken at one moment."""

    snapshot: Snapshot
    step: int | None
    aliases: dict[str, str]
    optim: GatheredOptimState | None

    def described_over(self, group: ProcessGroup | None) -> dict[str, str]:
        """Description of the optimizer state, if all of it is sharded over ``group``; otherwise empty."""
        comm = self._comm_over(group)
        return {} if self.optim is None or comm is None else self.optim.described(comm)

    def check_optim(self, group: ProcessGroup | None, described: list[dict[str, str]]) -> None:
        """Compare optimizer state across ranks, by ``described`` or group by group. **Collective.**

        Raises:
            ValueError: on all ranks, if the state differs.
        """
        if self.optim is not None and self._comm_over(group) is None:
            self.optim.check()
        problem = problem_among(described)
        if problem is not None:
            raise problem

    def _comm_over(self, group: ProcessGroup | None) -> Communicator | None:
        """The communicator of all units, if it spans all ranks of ``group``."""
        comms = [] if self.optim is None or group is None else self.optim.params.comms
        return comms[0] if len(comms) == 1 and group is not None and comms[0].world_size == group.size() else None


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    extra: dict[str, Any] | Stateful | None = None,
    *,
    step: int | None = None,
) -> None:
    """Write a checkpoint in ``torch.distributed.checkpoint``'s format into a new ``folder``. **Collective.**

    All ranks of the default process group call it, also those that hold no part of ``model``.
    ``folder`` appears once all of it is on the disk. ``model`` may be wrapped, contain wrappers, or be plain.
    ``extra`` is a dict of this rank's plain data, or an object with ``state_dict`` and ``load_state_dict``. A
    ``folder`` with a protocol (``s3://...``) is written through fsspec.

    Raises:
        CheckpointError: on every rank, if ``folder`` exists, cannot be written, or is not the same on all ranks; or if
            process groups of some of the ranks hold different parameters under one name.
        TypeError: on every rank, if a value could not be read back as plain data.
        ValueError: on every rank, if ``step`` is no number of steps.
    """
    training = Training(model, optimizer, scheduler, scaler, extra)
    path = full_path(folder)
    group = idle_group()

    def checked() -> str:
        if step is not None:
            check_step(step)
        if rank_in(group) == 0:
            _check_free(path)
        return path

    paths = on_all_ranks(group, checked)
    if len(set(paths)) > 1:
        raise CheckpointError(f"All ranks must save to the same folder, but theirs are {', '.join(paths[:4])}.")
    with collector_paused():
        draft = take(training, step, None)
        try:
            write(draft, path, group)
        finally:
            draft.snapshot.close()


def take(training: Training, step: int | None, buffers: Buffers | None) -> Draft:
    """Snapshot ``training`` into ``buffers``; if None, nothing is copied and training must wait. **Collective.**

    *Invariant*: what the ranks have run before a checkpoint has been compared; others are never written.

    Raises:
        CheckpointError, TypeError: on every rank.
        RanksDisagreeError: on every rank, if they have run different things.
    """
    group = idle_group()
    params = OptimParams(training.model)
    drafts: list[Draft] = []

    def draft() -> tuple[int | None, Histories, dict[str, int], dict[str, str], list[Piece], dict[str, str]]:
        drafts.append(_draft(training, params, rank_in(group), step, buffers))
        own, entries = drafts[0], drafts[0].snapshot.entries
        pieces = [] if group is None else shared_by_few(entries, params, group.size())
        settings = {} if group is None or own.optim is None else own.optim.settings(group.size())
        sums = replicated_sums(entries)
        return step, histories(training.model), sums, own.described_over(group), pieces, settings

    try:
        # One exchange checks that no rank failed and that all agree: each exchange stops training for milliseconds.
        with collector_paused():
            steps, run, sums, described, pieces, settings = zip(*on_all_ranks(group, draft), strict=True)
        check_histories(training.model, run, group)
        check_shared(pieces)
        if len(set(steps)) > 1:
            raise CheckpointError(f"All ranks must save the same step, but the ranks' steps are {list(steps)}.")
        drafts[0].check_optim(group, list(described))
        if (problem := problem_of_places(list(settings))) is not None:
            raise problem
        add_own_values(drafts[0].snapshot.entries, rank_in(group), list(sums))
    except BaseException:
        for own in drafts:
            own.snapshot.close()
        raise
    return drafts[0]


def _draft(training: Training, params: OptimParams, rank: int, step: int | None, buffers: Buffers | None) -> Draft:
    entries = object_entries(training, rank)
    entries["model"] = model_entries(training.model)
    optim = None
    if training.optimizer is not None:
        optim = GatheredOptimState(params, training.optimizer)
        entries["optim"] = optim.sharded(False, copies=False)
    live = live_storages(params, training.optimizer) if buffers is not None else set()
    return Draft(Snapshot(entries, buffers, live), step, aliases_of(params), optim)


def write(draft: Draft, folder: str, group: ProcessGroup | None, replace: Callable[[], None] = lambda: None) -> None:
    """Write ``draft`` beside ``folder``, then rename it to ``folder``. **Collective** over ``group``.

    Rank 0 calls ``replace`` just before the rename. A failed write removes its files.

    Raises:
        CheckpointError: on every rank.
        CollectiveFailedError: a rank has ended, is stopped, or does something else.
    """
    storage = storage_of(folder)
    rank = rank_in(group)
    beside = f"{storage.parent(folder)}/{TEMPORARY}{folder.rpartition('/')[2]}-"
    work = f"{beside}{uuid.uuid4().hex[:8]}"
    try:
        work = on_all_ranks(group, lambda: work)[0]
        on_all_ranks(group, lambda: storage.make(work))
        files = _write_files(draft, work, group)
        manifest = Manifest(draft.step, len(files), {k: v for own in files for k, v in own.items()}, draft.aliases)
        on_all_ranks(group, lambda: _publish(storage, work, folder, manifest, replace) if rank == 0 else None)
    except BaseException as error:
        if rank == 0:
            with contextlib.suppress(OSError):  # report the first error, not a failed clean-up
                storage.remove(work)
        if isinstance(error, Exception):
            raise not_saved(folder, error, group) from error
        raise


def not_saved(folder: str, error: Exception, group: ProcessGroup | None) -> FairshardError:
    """The error to raise after ``error`` ended the save of ``folder``."""
    if group is not None and not dist.is_initialized():
        return CheckpointError(
            f"{folder} was not saved: the process group was destroyed before it was written. Call Checkpointer.wait() "
            "before torch.distributed.destroy_process_group()."
        )
    if isinstance(error, (CollectiveFailedError, RanksDisagreeError)):
        return type(error)(f"{folder} was not saved. {error}")
    return CheckpointError(
        f"{folder} was not saved: {described(error).rstrip('.')}. Earlier checkpoints are unchanged."
    )


def _write_files(draft: Draft, work: str, group: ProcessGroup | None) -> list[dict[str, FileEntry]]:
    """Write this rank's files; returns the files of every rank, with their checksums."""
    writer = CheckpointWriter(work, group)
    try:
        with contextlib.nullcontext() if group is not None else _without_warnings():
            explained(dcp.save)(
                draft.snapshot.entries,
                storage_writer=writer,
                planner=SnapshotPlanner(draft.snapshot),
                process_group=group,
            )
    except CheckpointException as error:
        raise failure_of(error, group) from error
    return gather_objects(writer.files, group)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Ignore warnings in one thread at a time: torch warns if there is no process group.

    Threads that overlapped here would restore each other's filters, and leave all warnings ignored.
    """
    with _filters, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _publish(storage: Storage, work: str, folder: str, manifest: Manifest, replace: Callable[[], None]) -> None:
    for name in manifest.files:
        if not storage.exists(storage.join(work, name)):
            raise CheckpointError(
                f"All ranks must see the same folder, but rank 0 does not see {name}, which another rank wrote to "
                f"{work}. Save to a disk that all ranks share."
            )
    storage.replace_text(storage.join(work, MANIFEST), manifest.to_json())
    replace()
    _check_free(folder)  # another process may have made it since
    storage.publish(work, folder)


def _check_free(folder: str) -> None:
    if not storage_of(folder).is_free(folder):
        raise CheckpointError(
            f"A checkpoint must be saved under a new name, but {folder} exists. Use another, or remove it first."
        )
