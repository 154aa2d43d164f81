"""Loading a checkpoint into a model, optimizer and more, from any number of ranks and any wrapping."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_loader as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan
from torch.futures import Future
from torch.optim import Optimizer

from fairshard.checkpoint import rng
from fairshard.checkpoint.agreement import done_on_all_ranks, failure_of, idle_group, on_all_ranks, rank_in
from fairshard.checkpoint.contents import checkpoint_folder, model_keys
from fairshard.checkpoint.entries import Stateful, Training, model_entries, rank_key
from fairshard.checkpoint.manifest import read_manifest, verify_file
from fairshard.checkpoint.reader import METADATA, CheckpointReader, SafePlanner, first_line
from fairshard.checkpoint.storage import MANIFEST, full_path, storage_of
from fairshard.checkpoint.targets import ModelTarget, OptimizerTarget
from fairshard.errors import CheckpointError
from fairshard.settings.state_dicts import StateDictType
from fairshard.state.forms import state_dict_type
from fairshard.state.optim_loading import ShardedOptimState, check_of_class
from fairshard.state.optim_params import OptimParams
from fairshard.utils.collector import collector_paused
from fairshard.utils.failures import explained
from fairshard.utils.user_line import level_of_user

_KERNELS = ("foreach", "fused")  # settings that choose kernels: the script decides, not the checkpoint
VERIFY = ("reading", "before")
"""What ``verify`` may be; both mean the same."""


def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    extra: dict[str, Any] | Stateful | None = None,
    *,
    verify: str = "reading",
    allow_unverified: bool = False,
) -> int | None:
    """Load a checkpoint saved by any number of ranks with any wrapping; returns its step. **Collective.**

    ``folder`` is a checkpoint written by fairshard or by plain torch (FSDP2, for example), or the root folder of a
    run, whose latest checkpoint is loaded. Each rank reads the pieces that overlap its shards. ``extra`` is updated
    with the saved dict, or restored by its ``load_state_dict``. On the same number of ranks, random numbers continue.

    Nothing changes until every file has been compared with its checksum, all ranks have read everything, and
    everything fits. All files are read once for their checksums, and then a second time, from the page cache as a rule,
    for their values, so no damaged byte is ever interpreted; ``verify`` once chose another order, and has no effect. A
    checkpoint of fairshard without its manifest, which has the checksums, is refused unless ``allow_unverified``; one
    of plain torch never has a manifest, and is loaded with a warning.

    Raises:
        CheckpointError: on every rank, if a file is missing or damaged, or the checkpoint is of a different model,
            optimizer, scheduler or scaler.
        ValueError: on every rank, if the optimizer's state or groups do not fit; ``verify`` is neither of the two.
    """
    check_verify(verify)
    training = Training(model, optimizer, scheduler, scaler, extra)
    return load_training(folder, training, Trust(allow_unverified))


def check_verify(verify: str) -> None:
    """Check an argument that has no effect any more.

    Raises:
        ValueError: ``verify`` is unknown.
    """
    if verify not in VERIFY:
        raise ValueError(f"`verify` must be one of {', '.join(VERIFY)}, but is {verify!r}.")


@dataclass(frozen=True)
class Trust:
    """What a load demands of a checkpoint: see `load`; and to be of ``step``, by its manifest."""

    allow_unverified: bool = False
    step: int | None = None

    def check(self, reader: CheckpointReader, folder: str, rank: int) -> None:
        """Check the manifest and the metadata that ``reader`` has read; only rank 0 warns.

        Raises:
            CheckpointError: they do not vouch for all files, or are of another step.
        """
        reader.check_vouched(self.allow_unverified, warns=rank == 0)
        found = None if reader.manifest is None else reader.manifest.step
        if self.step is not None and found != self.step:
            raise CheckpointError(
                f"{folder} must be the checkpoint of step {self.step}, but its {MANIFEST} says "
                f"{'no step' if found is None else f'step {found}'}: the folder was renamed. Give it the name of its "
                "step."
            )


def load_training(folder: str | os.PathLike[str], training: Training, trust: Trust) -> int | None:
    """`load` into ``training``. **Collective.**"""
    group = idle_group()
    given = [name for name in ("optimizer", "scheduler", "scaler") if getattr(training, name) is not None]
    every = on_all_ranks(group, lambda: (full_path(folder), given, checkpoint_folder(folder)))
    for rank, (its_folder, its_given, _) in enumerate(every):
        if its_folder != every[0][0]:
            raise CheckpointError(
                f"All ranks must load the same folder, but rank 0 loads {every[0][0]}, and rank {rank} {its_folder}."
            )
        if its_given != every[0][1]:
            raise ValueError(
                "All ranks must load into the same objects, but besides the model rank 0 passes "
                f"{', '.join(every[0][1]) or 'none'}, and rank {rank} {', '.join(its_given) or 'none'}."
            )
    with collector_paused():
        reader = RankReader(every[0][2], group)
        on_all_ranks(group, lambda: reader.check_files(trust))
        loading = Loading(every[0][2], training, group, reader)
        loading.read()
        return loading.apply()


def load_optimizer(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer, *, allow_unverified: bool = False
) -> None:
    """Load ``optimizer``, which steps ``model``, from a checkpoint of an optimizer alone. **Collective.**

    ``folder`` was written by ``torch.distributed.checkpoint`` with the result of ``FSDP.optim_state_dict``, sharded or
    whole, under any key. torch's own ``load`` reads only what a new optimizer already has: no state. Here a new
    optimizer gets all state; the state of one that was saved before its first step is empty. Each rank reads the
    pieces that overlap its shards. ``allow_unverified``: see `load`.

    Raises:
        CheckpointError: on every rank, if a file is missing or damaged, or it holds no optimizer of this model.
        ValueError: on every rank, if the optimizer's state or groups do not fit.
    """
    group = idle_group()
    path = os.fspath(folder)
    reader = RankReader(path, group)
    params = OptimParams(model)
    target = OptimizerTarget()
    made: dict[str, Any] = {}

    def make_room() -> None:
        nonlocal target
        reader.check_files(Trust(allow_unverified=allow_unverified))
        metadata = reader.read_metadata()
        target = OptimizerTarget.of(path, metadata, metadata.state_dict_metadata, params, _held_by(optimizer))

    def make_state() -> None:
        made.update(_made_for(optimizer, model, params, target.state_dict(target.values)))

    with collector_paused():
        on_all_ranks(group, make_room)
        _read(target.values, reader, group)
        on_all_ranks(group, make_state)
        optimizer.load_state_dict(made)


class RankReader(CheckpointReader):
    """Reads on all ranks of ``group``."""

    def __init__(self, path: str, group: ProcessGroup | None) -> None:
        super().__init__(path)
        self._group = group

    def check_files(self, trust: Trust) -> None:
        """Read the manifest and the metadata, and compare this rank's share of the files with their checksums.

        Raises:
            CheckpointError: a file is missing or damaged, or nothing vouches for it.
        """
        storage = storage_of(self.folder)
        self.manifest = read_manifest(storage, self.folder)
        rank, num_ranks = rank_in(self._group), 1 if self._group is None else self._group.size()
        files = {} if self.manifest is None else self.manifest.files
        for name in sorted(files, key=_in_order_of_ranks)[rank::num_ranks]:
            verify_file(storage, self.folder, name, files[name])
        trust.check(self, self.folder, rank)

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Read, and wait until the other ranks have."""
        return done_on_all_ranks(self._group, lambda: super(RankReader, self).read_data(plan, planner))


def _in_order_of_ranks(name: str) -> tuple[bool, int, str]:
    """Sort key that gives each rank, of as many as have saved, its own file: ``__2_0.distcp`` before ``__10_0``."""
    return name == METADATA, len(name), name


def _unfold(model: nn.Module) -> None:
    """Give expanded buffers memory for each element: torch refuses to copy into one place that stands for several."""
    for buffer in model.buffers():
        if any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, _strides(buffer), strict=True)):
            buffer.data = buffer.contiguous()


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout is torch.strided else tuple(tensor.shape)


def _held_by(optimizer: Optimizer) -> set[nn.Parameter]:
    return {param for group in optimizer.param_groups for param in group["params"]}


def _read(values: dict[str, Any], reader: CheckpointReader, group: ProcessGroup | None) -> None:
    """Read the entries of ``values`` in place. **Collective.**"""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns if there is no process group
            explained(dcp.load)(values, storage_reader=reader, planner=SafePlanner(), process_group=group)
    except CheckpointException as error:
        raise failure_of(error, group) from error


def _made_for(optimizer: Optimizer, model: nn.Module, params: OptimParams, saved: dict[str, Any]) -> dict[str, Any]:
    """What ``optimizer.load_state_dict`` takes for the state ``saved`` by name. **Collective.**"""
    made = ShardedOptimState(model, adopts=True).make(saved, params.groups_of(optimizer))
    check_of_class(made, optimizer)
    for group, own in zip(made.get("param_groups", ()), optimizer.param_groups, strict=False):
        group.update({name: own[name] for name in _KERNELS if name in group and name in own})
    return {"param_groups": optimizer.state_dict()["param_groups"], **made}


class Loading:
    """One load: allocate memory, read into it, apply."""

    def __init__(self, folder: str, training: Training, group: ProcessGroup | None, reader: RankReader) -> None:
        self._folder = folder
        self._training = training
        self._group = group
        self._rank = rank_in(group)
        self._num_ranks = 1 if group is None else group.size()
        self._reader = reader
        self._model = ModelTarget({}, {})
        self._optimizer: OptimizerTarget | None = None
        self._made: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        self._own_key: str | None = None
        self._is_same_number = False

    def read(self) -> None:
        """Read all targets into new memory."""
        model, optimizer = self._training.model, self._training.optimizer
        with state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = model.state_dict(keep_vars=True)  # live values, of which only the form is used
        params = OptimParams(model)
        missing = on_all_ranks(self._group, lambda: self._make_room(state, params))
        self._model.check_used(self._folder, missing)  # ranks may have parts of a pipeline, or experts of their own
        _read(self._values, self._reader, self._group)
        on_all_ranks(self._group, self._check_own)
        if optimizer is not None:
            on_all_ranks(self._group, lambda: self._make_optimizer_state(params, optimizer))

    def _check_own(self) -> None:
        """Check the rank's own values, so that `apply` cannot fail in the middle."""
        extra = None
        if self._own_key is not None:
            try:
                saved = self._values[self._own_key][0]
                extra = saved["extra"]
                if self._is_same_number:
                    rng.check(saved["rng"])
                    if any(target.shape != value.shape for target, value in self._own_values(saved["values"])):
                        raise ValueError("a value has another shape than the model's")
                if isinstance(self._training.extra, dict):
                    dict(extra or {})
            except Exception as error:  # damaged values can raise anything
                raise CheckpointError(
                    f"{self._folder} must hold what a rank saved as `{self._own_key}`, but does not: "
                    f"{type(error).__name__}: {first_line(error)} It is damaged. Use another checkpoint."
                ) from error
        if isinstance(self._training.extra, Stateful) and extra is None:
            raise CheckpointError(
                f"{self._folder} must hold an `extra` to load one, but was saved without one. Leave `extra` out."
            )

    def _own_values(self, values: Mapping[str, Tensor]) -> list[tuple[Any, Tensor]]:
        """The model's entries for ``values``, each with its value."""
        entries = model_entries(self._training.model) if values else {}  # it takes as long as a state dict
        return [(entries[name], value) for name, value in values.items()]

    def _make_room(self, state: Mapping[str, Any], params: OptimParams) -> bytes:
        """Allocate the targets; returns the `ModelTarget.missing`."""
        metadata = self._reader.read_metadata()
        known = metadata.state_dict_metadata
        self._model = ModelTarget.of(self._folder, state, metadata, params)
        self._values = dict(self._model.values)
        if self._training.optimizer is not None:
            beside = set(known) - set(model_keys(metadata).values())
            held = _held_by(self._training.optimizer)
            self._optimizer = OptimizerTarget.of(self._folder, metadata, beside, params, held)
            self._values.update(self._optimizer.values)
        for name in ("scheduler", "scaler"):
            if getattr(self._training, name) is not None:
                if name not in known:
                    raise CheckpointError(
                        f"{self._folder} must hold a {name} to load one, but was saved without one. Leave `{name}` out."
                    )
                self._values[name] = None
        self._own_key = self._own_objects(known)
        if self._own_key is not None:
            self._values[self._own_key] = None
        return self._model.missing

    def _own_objects(self, known: Mapping[str, Any]) -> str | None:
        """Key of the rank's own values to load: this rank's, or rank 0's if the number of ranks differs."""
        self._is_same_number = rank_key(self._num_ranks - 1) in known and rank_key(self._num_ranks) not in known
        if self._is_same_number:
            return rank_key(self._rank)
        return rank_key(0) if rank_key(0) in known else None

    def _make_optimizer_state(self, params: OptimParams, optimizer: Optimizer) -> None:
        assert self._optimizer is not None
        saved = self._optimizer.state_dict(self._values)
        try:
            self._made = _made_for(optimizer, self._training.model, params, saved)
        except (KeyError, IndexError, AttributeError) as error:
            raise CheckpointError(
                f"{self._folder} must hold the state of an optimizer, but what it holds has no {first_line(error)} It "
                "is damaged. Use another checkpoint."
            ) from error

    def apply(self) -> int | None:
        """Apply the values read to all objects; returns the step."""
        training = self._training
        others = [other for other in (training.scheduler, training.scaler) if other is not None]
        with _unchanged_on_error(training.optimizer, others):
            on_all_ranks(self._group, self._load_states)  # before the weights, because only these may refuse
            _unfold(training.model)
            with state_dict_type(training.model, StateDictType.SHARDED_STATE_DICT):
                training.model.load_state_dict(self._model.state_dict(self._values))
        if self._own_key is not None:
            self._apply_own(self._values[self._own_key][0])
        return None if self._reader.manifest is None else self._reader.manifest.step

    def _load_states(self) -> None:
        for name in ("optimizer", "scheduler", "scaler"):
            target = getattr(self._training, name)
            if target is None:
                continue
            try:
                target.load_state_dict(self._made if name == "optimizer" else self._values[name][0])
            except ValueError:
                raise
            except Exception as error:  # state of another class can raise anything
                raise CheckpointError(
                    f"{self._folder} must hold the state of a {type(target).__name__} to load as {name}, but its "
                    f"load_state_dict raises {type(error).__name__}: {first_line(error)} Build the {name} that was "
                    "saved, or leave it out."
                ) from error

    def _apply_own(self, saved: Mapping[str, Any]) -> None:
        extra = self._training.extra
        if isinstance(extra, Stateful):
            extra.load_state_dict(saved["extra"])
        elif extra is not None:
            extra.update(saved["extra"] or {})
        if self._is_same_number:
            rng.restore(saved["rng"])
            for target, value in self._own_values(saved["values"]):
                target.copy_(value)
        else:
            warnings.warn(
                f"{self._folder} was saved by another number of ranks: the state of random number generators is "
                "not restored, and `extra` comes from rank 0.",
                stacklevel=level_of_user(),
            )


@contextlib.contextmanager
def _unchanged_on_error(optimizer: Optimizer | None, others: Sequence[Stateful]) -> Iterator[None]:
    """If the ``with`` block raises, put back the state of all that it has loaded state into.

    torch's optimizers replace their state and groups in a load, and do not write into them.
    """
    kept = None if optimizer is None else (optimizer.state, optimizer.param_groups)
    states = [other.state_dict() for other in others]
    try:
        yield
    except BaseException:
        if optimizer is not None and kept is not None:
            optimizer.state, optimizer.param_groups = kept
        for other, state in zip(others, states, strict=True):
            other.load_state_dict(state)
        raise
