"""Writing one checkpoint atomically: it appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from fairshard.checkpoint.agreement import (
    described,
    idle_group,
    on_all_ranks,
    on_first_rank,
    rank_in,
    size_of,
    with_torch,
)
from fairshard.checkpoint.entries import (
    Stateful,
    Training,
    aliases_of,
    checksum,
    live_storages,
    model_entries,
    object_entries,
    rank_key,
    replicated,
)
from fairshard.checkpoint.manifest import FileEntry, Manifest
from fairshard.checkpoint.snapshot import Buffers, Snapshot
from fairshard.checkpoint.step_folders import check_step
from fairshard.checkpoint.storage import MANIFEST, TEMPORARY, Storage, full_path, storage_of
from fairshard.checkpoint.writer import CheckpointWriter, SnapshotPlanner
from fairshard.checks.histories import Histories, check_histories, histories
from fairshard.errors import CheckpointError, CollectiveFailedError, FairshardError, RanksDisagreeError
from fairshard.state.optim_gathering import GatheredOptimState, problem_among, problem_of_places
from fairshard.state.optim_params import OptimParams
from fairshard.utils.collectives import gather_objects
from fairshard.utils.collector import collector_paused
from fairshard.utils.span_tensor import SpanTensor


@dataclass
class Draft:
    """A checkpoint to write: a snapshot taken at one moment."""

    snapshot: Snapshot
    step: int | None
    aliases: dict[str, str]


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
    rank, num_ranks = rank_in(group), size_of(group)
    model, optimizer = training.model, training.optimizer
    params = OptimParams(model)
    comms = [comm for comm in params.comms if comm.world_size == num_ranks] if len(params.comms) == 1 else []
    optims: list[GatheredOptimState] = []
    snapshots: list[Snapshot] = []

    def facts() -> Facts:
        entries = {**object_entries(training, rank), "model": model_entries(model)}
        state, settings = {}, {}
        if optimizer is not None:
            optim = GatheredOptimState(params, optimizer)
            optims.append(optim)
            entries["optim"] = optim.sharded(False, copies=False)
            state = optim.described(comms[0]) if comms else {}
            settings = optim.settings(num_ranks)
        live = live_storages(params, optimizer) if buffers is not None else set()
        snapshots.append(Snapshot(entries, buffers, live))
        pieces = shared_by_few(snapshots[0].entries, params, num_ranks)
        sums = {name: checksum(value) for name, value in replicated(snapshots[0].entries).items()}
        return Facts(step, histories(model), sums, pieces, state, settings)

    try:
        with collector_paused():
            # One exchange checks that no rank failed and that all agree: each one stops training for milliseconds.
            every = on_all_ranks(group, facts)
        check_histories(model, [own.run for own in every], group)
        for optim in [] if comms else optims:  # several groups compare one by one
            optim.check()
        check_facts(every)
        entries, first, own = snapshots[0].entries, every[0].sums, every[rank].sums
        entries[rank_key(rank)][0]["values"] = {
            name: value.to("cpu", copy=True)
            for name, value in replicated(entries).items()
            if own[name] != first.get(name)
        }
    except BaseException:
        for snapshot in snapshots:
            snapshot.close()
        raise
    return Draft(snapshots[0], step, aliases_of(params))


Box = tuple[Sequence[int], Sequence[int]]
"""Offsets and sizes of a part of a tensor."""


@dataclass(frozen=True)
class Facts:
    """What one rank is about to save.

    ``run``: what it has run; ``sums``: of the model's replicated values; ``state``, ``settings``: descriptions of the
    optimizer; ``pieces``: see `shared_by_few`.
    """

    step: int | None
    run: Histories
    sums: dict[str, int]
    pieces: dict[tuple[str, int, Box], int] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)


def check_facts(every: Sequence[Facts]) -> None:
    """Check the facts of all ranks, apart from what they have run; the same on every rank.

    Raises:
        CheckpointError: ranks save another step, or have other values of a parameter, of which one would be lost.
        ValueError: their optimizers differ.
    """
    check_shared([own.pieces for own in every])
    steps = [own.step for own in every]
    if len(set(steps)) > 1:
        raise CheckpointError(f"All ranks must save the same step, but the ranks' steps are {steps}.")
    problem = problem_among([own.state for own in every]) or problem_of_places([own.settings for own in every])
    if problem is not None:
        raise problem


def shared_by_few(entries: Mapping[str, Any], params: OptimParams, num_ranks: int) -> dict[tuple[str, int, Box], int]:
    """Checksums of this rank's pieces of what is cut among fewer ranks than the ``num_ranks`` that save ``entries``.

    By the name of a parameter or of its state, its number of elements, and the piece's box. Other ranks may have
    parameters of their own under the same names. Values that are not cut are saved by each rank where they differ.
    """
    names = {
        name
        for named in params
        if named.flat_param is not None and named.flat_param.comms.num_ranks < num_ranks
        for name in named.first_names
    }
    values = {name: value for name, value in entries["model"].items() if name in names}
    for name, state in entries.get("optim", {"state": {}})["state"].items():
        values.update({f"{key}` of `{name}": value for key, value in state.items() if name in names})
    found: dict[tuple[str, int, Box], int] = {}
    for name, value in values.items():
        if isinstance(value, SpanTensor):
            found[name, value.numel(), ((value.start,), (value.run.numel(),))] = checksum(value.run)
        elif isinstance(value, DTensor) and value.device_mesh.size() < num_ranks:  # otherwise the rest has the others
            sizes, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
            found[name, value.numel(), (offsets, sizes)] = checksum(value.to_local())
    return found


def check_shared(every: Sequence[Mapping[tuple[str, int, Box], int]]) -> None:
    """Check the `shared_by_few` of all ranks.

    Raises:
        CheckpointError: ranks have different values of a parameter.
    """
    sums: dict[tuple[str, int, Box], int] = {}
    holders: dict[str, int] = {}
    covered: Counter[str] = Counter()
    for rank, pieces in enumerate(every):
        for key, own in pieces.items():
            name, numel, (_, sizes) = key
            covered[name] += 0 if key in sums else prod(sizes)
            if sums.setdefault(key, own) != own or covered[name] > numel:
                raise CheckpointError(
                    f"A checkpoint holds one value of each name, but `{name}` is another one, or is cut in another "
                    f"way, on rank {rank} than on rank {holders[name]}: it is sharded among some of the ranks only, "
                    "and others have weights of their own under its name. Save such modules apart, each group its own "
                    "into a folder of its own: torch.distributed.checkpoint.save(module.state_dict(), "
                    "checkpoint_id=..., process_group=group)."
                )
            holders.setdefault(name, rank)


def write(draft: Draft, folder: str, group: ProcessGroup | None, replace: Callable[[], None] = lambda: None) -> None:
    """Write ``draft`` beside ``folder``, then rename it to ``folder``. **Collective** over ``group``.

    Rank 0 calls ``replace`` just before the rename. A failed write removes its files.

    Raises:
        CheckpointError: on every rank.
        CollectiveFailedError: a rank has ended, is stopped, or does something else.
    """
    storage = storage_of(folder)
    work = f"{storage.parent(folder)}/{TEMPORARY}{folder.rpartition('/')[2]}-{uuid.uuid4().hex[:8]}"
    try:
        work = on_first_rank(group, lambda: work)
        on_all_ranks(group, lambda: storage.make(work))
        files = _write_files(draft, work, group)
        manifest = Manifest(draft.step, len(files), {k: v for own in files for k, v in own.items()}, draft.aliases)
        on_first_rank(group, lambda: _publish(storage, work, folder, manifest, replace))
    except BaseException as error:
        if rank_in(group) == 0:
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
    writer, planner = CheckpointWriter(work, group), SnapshotPlanner(draft.snapshot)
    with_torch(dcp.save, draft.snapshot.entries, group, storage_writer=writer, planner=planner)
    return gather_objects(writer.files, group)


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
