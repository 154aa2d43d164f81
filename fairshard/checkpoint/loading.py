"""Loading a checkpoint into a model, optimizer and more, from any number of ranks and any wrapping."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_loader as dcp
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.optim import Optimizer

from fairshard.checkpoint.agreement import done_on_all_ranks, idle_group, on_all_ranks, rank_in, size_of, with_torch
from fairshard.checkpoint.contents import checkpoint_folder, model_keys, whole_entry
from fairshard.checkpoint.entries import Stateful, Training, check_rng, model_entries, rank_key, restore_rng, unwrapped
from fairshard.checkpoint.reader import CheckpointReader, SafePlanner, first_line
from fairshard.checkpoint.storage import full_path
from fairshard.errors import CheckpointError
from fairshard.settings.state_dicts import StateDictType
from fairshard.state.forms import state_dict_type
from fairshard.state.full_params import spans_of
from fairshard.state.optim_loading import ShardedOptimState, check_of_class, is_elementwise, zeros_like_shard
from fairshard.state.optim_params import NamedParam, OptimParams
from fairshard.utils.collector import collector_paused
from fairshard.utils.span_tensor import SpanTensor
from fairshard.utils.subclasses import is_wrapper
from fairshard.utils.user_line import level_of_user

_KERNELS = ("foreach", "fused")  # settings that choose kernels: the script decides, not the checkpoint
_MOST_NAMES = 4
_Path = tuple[Any, ...]


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
        ValueError: on every rank, if the optimizer's state or groups do not fit, or parameters are on the meta device.
    """
    training = Training(model, optimizer, scheduler, scaler, extra)
    return load_training(folder, training, allow_unverified)


def load_training(
    folder: str | os.PathLike[str], training: Training, allow_unverified: bool = False, step: int | None = None
) -> int | None:
    """`load` into ``training``; the checkpoint must be of ``step``, if that is given. **Collective.**"""
    group = idle_group()
    given = ", ".join(name for name in ("optimizer", "scheduler", "scaler") if getattr(training, name) is not None)
    every = on_all_ranks(group, lambda: (full_path(folder), given or "none", checkpoint_folder(folder)))
    for rank, (its_folder, its_given, _) in enumerate(every):
        if its_folder != every[0][0]:
            raise CheckpointError(
                f"All ranks must load the same folder, but rank 0 loads {every[0][0]}, and rank {rank} {its_folder}."
            )
        if its_given != every[0][1]:
            raise ValueError(
                f"All ranks must load into the same objects, but besides the model rank 0 passes {every[0][1]}, and "
                f"rank {rank} {its_given}."
            )
    with collector_paused():
        reader = RankReader(every[0][2], group)
        on_all_ranks(group, lambda: reader.check_files(allow_unverified, step, rank_in(group), size_of(group)))
        loading = Loading(training, group, reader)
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
    reader = RankReader(os.fspath(folder), group)
    params = OptimParams(model)

    def target() -> OptimizerTarget:
        reader.check_files(allow_unverified, None, rank_in(group), size_of(group))
        metadata = reader.read_metadata()
        return OptimizerTarget(reader.folder, metadata, metadata.state_dict_metadata, params, _held_by(optimizer))

    with collector_paused():
        found = done_on_all_ranks(group, target)
        reader.read(found.values)
        saved = found.state_dict(found.values)
        optimizer.load_state_dict(done_on_all_ranks(group, lambda: _made_for(optimizer, model, params, saved)))


class RankReader(CheckpointReader):
    """Reads on all ranks of ``group``."""

    def __init__(self, path: str, group: ProcessGroup | None) -> None:
        super().__init__(path)
        self._group = group

    def read(self, values: dict[str, Any]) -> None:
        """Read the entries of ``values`` in place. **Collective.**"""
        with_torch(dcp.load, values, self._group, storage_reader=self, planner=SafePlanner())

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Read, and wait until the other ranks have."""
        return done_on_all_ranks(self._group, lambda: super(RankReader, self).read_data(plan, planner))


def _unfold(model: nn.Module) -> None:
    """Give expanded buffers memory for each element: torch refuses to copy into one place that stands for several."""
    for buffer in model.buffers():
        if buffer.layout is torch.strided and any(
            size > 1 and not step for size, step in zip(buffer.shape, buffer.stride(), strict=True)
        ):
            buffer.data = buffer.contiguous()


def _held_by(optimizer: Optimizer) -> set[nn.Parameter]:
    return {param for group in optimizer.param_groups for param in group["params"]}


def _made_for(optimizer: Optimizer, model: nn.Module, params: OptimParams, saved: dict[str, Any]) -> dict[str, Any]:
    """What ``optimizer.load_state_dict`` takes for the state ``saved`` by name. **Collective.**"""
    made = ShardedOptimState(model, adopts=True).make(saved, params.groups_of(optimizer))
    check_of_class(made, optimizer)
    for group, own in zip(made.get("param_groups", ()), optimizer.param_groups, strict=False):
        group.update({name: own[name] for name in _KERNELS if name in group and name in own})
    return {"param_groups": optimizer.state_dict()["param_groups"], **made}


class Loading:
    """One load: allocate memory, read into it, apply."""

    def __init__(self, training: Training, group: ProcessGroup | None, reader: RankReader) -> None:
        self._training = training
        self._group = group
        self._reader = reader
        self._folder = reader.folder
        self._values: dict[str, Any] = {}
        known = reader.read_metadata().state_dict_metadata
        num_ranks = size_of(group)
        self._is_same_number = rank_key(num_ranks - 1) in known and rank_key(num_ranks) not in known
        own_key = rank_key(rank_in(group) if self._is_same_number else 0)
        self._own_key = own_key if own_key in known else None  # of the rank's own values

    def read(self) -> None:
        """Read all targets into new memory, and check that `apply` cannot fail in the middle."""
        with state_dict_type(self._training.model, StateDictType.SHARDED_STATE_DICT):
            state = self._training.model.state_dict(keep_vars=True)  # live values, of which only the form is used
        params = OptimParams(self._training.model)
        missing = on_all_ranks(self._group, lambda: self._make_room(state, params))
        self._model.check_used(missing)  # ranks may have parts of a pipeline, or experts of their own
        self._reader.read(self._values)
        on_all_ranks(self._group, self._check_own)
        self._states = done_on_all_ranks(self._group, lambda: self._made_states(params))

    def _make_room(self, state: Mapping[str, Any], params: OptimParams) -> int:
        """Allocate the targets; returns the `ModelTarget.missing`."""
        training, metadata = self._training, self._reader.read_metadata()
        known = metadata.state_dict_metadata
        empty = [name for name, value in state.items() if isinstance(value, Tensor) and value.is_meta]
        if empty:
            raise ValueError(
                f"A model must have memory to load into, but `{empty[0]}` and {len(empty) - 1} more are on the meta "
                "device. Call `model.to_empty(device=...)` first."
            )
        self._model = ModelTarget(self._folder, state, metadata, params)
        self._values.update(self._model.values)
        if training.optimizer is not None:
            beside = known.keys() - set(model_keys(metadata).values())
            self._optimizer = OptimizerTarget(self._folder, metadata, beside, params, _held_by(training.optimizer))
            self._values.update(self._optimizer.values)
        for name in training.others:
            if name not in known:
                raise CheckpointError(
                    f"{self._folder} must hold a {name} to load one, but was saved without one. Leave `{name}` out."
                )
            self._values[name] = None
        if self._own_key is not None:
            self._values[self._own_key] = None
        return self._model.missing

    def _check_own(self) -> None:
        """Check the rank's own values."""
        extra = None
        if self._own_key is not None:
            try:
                (saved,) = self._values[self._own_key]
                extra = saved["extra"]
                if self._is_same_number:
                    check_rng(saved["rng"])
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

    def _made_states(self, params: OptimParams) -> dict[str, Any]:
        """What `load_state_dict` of each object but the model takes."""
        training = self._training
        found = {name: self._values[name][0] for name in training.others}
        if training.optimizer is None:
            return found
        saved = self._optimizer.state_dict(self._values)
        try:
            return {"optimizer": _made_for(training.optimizer, training.model, params, saved), **found}
        except (KeyError, IndexError, AttributeError) as error:
            raise CheckpointError(
                f"{self._folder} must hold the state of an optimizer, but what it holds has no {first_line(error)} It "
                "is damaged. Use another checkpoint."
            ) from error

    def apply(self) -> int | None:
        """Apply the values read to all objects; returns the step."""
        training = self._training
        with _unchanged_on_error(training):
            on_all_ranks(self._group, self._load_states)  # before the weights, because only these may refuse
            _unfold(training.model)
            with state_dict_type(training.model, StateDictType.SHARDED_STATE_DICT):
                training.model.load_state_dict(self._model.state_dict(self._values))
        if self._own_key is not None:
            self._apply_own(self._values[self._own_key][0])
        return None if self._reader.manifest is None else self._reader.manifest.step

    def _load_states(self) -> None:
        for name, found in self._states.items():
            target = getattr(self._training, name)
            try:
                target.load_state_dict(found)
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
            restore_rng(saved["rng"])
            for target, value in self._own_values(saved["values"]):
                target.copy_(value)
        else:
            warnings.warn(
                f"{self._folder} was saved by another number of ranks: the state of random number generators is "
                "not restored, and `extra` comes from rank 0.",
                stacklevel=level_of_user(),
            )


@contextlib.contextmanager
def _unchanged_on_error(training: Training) -> Iterator[None]:
    """If the ``with`` block raises, put back the state of all that it has loaded state into.

    torch's optimizers replace their state and groups in a load, and do not write into them.
    """
    optimizer, others = training.optimizer, training.others
    kept = None if optimizer is None else (optimizer.state, optimizer.param_groups)
    states = {name: other.state_dict() for name, other in others.items()}
    try:
        yield
    except BaseException:
        if optimizer is not None and kept is not None:
            optimizer.state, optimizer.param_groups = kept
        for name, other in others.items():
            other.load_state_dict(states[name])
        raise


# ---- targets: what to read, and the memory to read it into; keys may be ours, or those of torch's tools


class ModelTarget:
    """The model's part of a checkpoint; ``values`` to read into, by key.

    Each name of the model's sharded state dict ``state`` has one key, or one for each part, such as of a dict of
    ``get_extra_state``; with its path in the value.

    Raises:
        CheckpointError: the checkpoint was saved from a different model.
    """

    def __init__(self, folder: str, state: Mapping[str, Any], metadata: Metadata, params: OptimParams) -> None:
        known, there = metadata.state_dict_metadata, model_keys(metadata)
        prefix = next((key[: len(key) - len(name)] for name, key in there.items()), "")
        self._folder = folder
        self._parts: dict[str, dict[str, _Path]] = {}
        self._saved = list(there)
        self.values: dict[str, Any] = {}
        problems = []
        for name, value in state.items():
            key = next((prefix + own for own in _names_of(name, params) if prefix + own in known), None)
            if key is None:
                parts = {} if isinstance(value, Tensor) else _parts_of(name, prefix, metadata)
                if not parts and value != {}:  # an empty dict has no parts
                    problems.append(f"`{name}` is missing")
                self._parts[name] = parts
                self.values.update({part: _room_for(known[part]) for part in parts})
                continue
            is_tensor = isinstance(known[key], TensorStorageMetadata)
            if is_tensor != isinstance(value, Tensor):
                problems.append(f"`{name}` is {'a tensor' if is_tensor else 'an object'}")
            elif is_tensor and (size := whole_entry(folder, metadata, key).size) != value.shape:
                problems.append(f"`{name}` has shape {tuple(size)} instead of {tuple(value.shape)}")
            self._parts[name] = {key: ()}
            self.values[key] = _room_like(value) if isinstance(value, Tensor) else value
        self.missing = sum(1 << place for place, key in enumerate(there.values()) if key not in self.values)
        """A bit for each name in the checkpoint that the model does not have on this rank."""
        if problems:
            raise _other_model(folder, [*problems, *self._not_in_model(self.missing)])

    def check_used(self, missing: Sequence[int]) -> None:
        """Check that each saved name is in the model of some rank; ``missing``: that of each rank.

        Raises:
            CheckpointError: on every rank, if some are in none.
        """
        if nowhere := self._not_in_model(functools.reduce(operator.and_, missing)):
            raise _other_model(self._folder, nowhere)

    def state_dict(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The model's state dict, from the ``values`` read."""
        found: dict[str, Any] = {name: {} for name, parts in self._parts.items() if not parts}
        for name, parts in self._parts.items():
            for key, path in parts.items():
                set_element(found, (name, *path), values[key] if path else unwrapped(values[key]))
        return found

    def _not_in_model(self, missing: int) -> list[str]:
        return [f"`{name}` is not in the model" for place, name in enumerate(self._saved) if missing >> place & 1]


class OptimizerTarget:
    """The part of an optimizer that steps ``held``, saved under some of ``keys``; ``values`` to read into, by key.

    Raises:
        CheckpointError: the checkpoint holds no optimizer of this model.
    """

    def __init__(
        self, folder: str, metadata: Metadata, keys: Collection[str], params: OptimParams, held: set[nn.Parameter]
    ) -> None:
        known = metadata.state_dict_metadata
        others = [key for key in known if key in keys]
        prefix = _optimizer_prefix(others, params)
        if prefix is None:
            raise CheckpointError(
                f"{folder} must hold an optimizer of this model to load one, but has none. Leave `optimizer` out."
            )
        self.values: dict[str, Any] = {}
        self._keys: dict[str, dict[str, str]] = {}  # by parameter and name of state
        self._paths: dict[str, _Path] = {}  # of keys in the list of param groups
        found: dict[str, dict[str, str]] = {}
        for key in others:
            if key.startswith(f"{prefix}state."):
                name, _, state = key.removeprefix(f"{prefix}state.").rpartition(".")
                found.setdefault(name, {})[state] = key
                if isinstance(known[key], TensorStorageMetadata):
                    whole_entry(folder, metadata, key)
        for named in params:
            if named.param in held:
                self._add_state(named, found, known)
        groups = f"{prefix}param_groups"
        for key in others:
            if key == groups or key.startswith(f"{groups}."):
                self._paths[key] = _path_in_groups(key, groups, metadata)
                self.values[key] = _room_for(known[key])

    def _add_state(self, named: NamedParam, found: Mapping[str, dict[str, str]], known: Mapping[str, Any]) -> None:
        """Make room for the state of one parameter or shard; elementwise state in one piece of memory."""
        own = [next((found[name] for name in names if name in found), {}) for names in named.names]
        for state in dict.fromkeys(state for keys in own for state in keys):
            entries = [known[keys[state]] if state in keys else None for keys in own]
            tensors = [entry for entry in entries if isinstance(entry, TensorStorageMetadata)]
            spans: Sequence[Any] = [None] * len(own)
            if named.flat_param and tensors and is_elementwise(named, state, [entry.size for entry in tensors]):
                spans = spans_of(named.flat_param, zeros_like_shard(named.flat_param, tensors[0].properties.dtype))
            for name, keys, entry, span in zip(named.first_names, own, entries, spans, strict=True):
                if entry is not None:
                    self._keys.setdefault(name, {})[state] = keys[state]
                    is_span = span is not None and span.shape == getattr(entry, "size", None)
                    self.values[keys[state]] = span if is_span else _room_for(entry, named)

    def state_dict(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Optimizer state by name, from the ``values`` read."""
        state = {name: {own: values[key] for own, key in keys.items()} for name, keys in self._keys.items()}
        by_number: dict[Any, dict[str, Any]] = {}
        for key, path in self._paths.items():
            if not path:
                return {"state": state, "param_groups": list(values[key])}
            number, setting = path[0], ".".join(map(str, path[1:]))
            group = by_number.setdefault(number, {} if isinstance(number, int) else {"params": [number]})
            group[setting] = values[key]
        return {"state": state, **({"param_groups": list(by_number.values())} if by_number else {})}


def _path_in_groups(key: str, groups: str, metadata: Metadata) -> _Path:
    """The path of an entry in the list of param groups: of a group's setting, or of the setting of one parameter."""
    path = (metadata.planner_data or {}).get(key, ())
    if "param_groups" in path:
        return tuple(path[path.index("param_groups") + 1 :])
    name, _, setting = key.removeprefix(groups).removeprefix(".").rpartition(".")
    return (name, setting) if setting else ()


def _other_model(folder: str, problems: Sequence[str]) -> CheckpointError:
    more = f", and {len(problems) - _MOST_NAMES} more" if len(problems) > _MOST_NAMES else ""
    return CheckpointError(
        f"{folder} must be a checkpoint of this model, but: {', '.join(problems[:_MOST_NAMES])}{more}. Build the model "
        "that was saved, or choose another checkpoint."
    )


def _parts_of(name: str, prefix: str, metadata: Metadata) -> dict[str, _Path]:
    """Keys of the parts of object ``name``, which torch's planner has flattened, and their paths in it."""
    start, paths = f"{prefix}{name}.", metadata.planner_data or {}
    found: dict[str, _Path] = {}
    for key in metadata.state_dict_metadata:
        if key.startswith(start):
            path = paths.get(key, ())
            found[key] = tuple(path[path.index(name) + 1 :] if name in path else key.removeprefix(start).split("."))
    return found


def _room_like(value: Tensor) -> Tensor:
    """New memory in the form of ``value``, all of which a load fills."""
    local = value._local_tensor if isinstance(value, DTensor) else value
    only_the_class_knows = is_wrapper(local) and not isinstance(local, SpanTensor)
    return value.detach().clone() if only_the_class_knows else torch.empty_like(value.detach())


def _room_for(entry: Any, named: NamedParam | None = None) -> Any:
    """New memory for an entry; on the device of ``named``, if it is a whole parameter whose state is no number."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    is_whole = named is not None and named.flat_param is None and len(entry.size)
    device = named.param.device if named is not None and is_whole else "cpu"
    return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)


def _names_of(name: str, params: OptimParams) -> Iterator[str]:
    """``name``, then the names of weights tied to it."""
    yield name
    named = params.find(name)
    for names in named.names if named is not None else ():
        if name in names:
            yield from names


def _optimizer_prefix(keys: Iterable[str], params: OptimParams) -> str | None:
    """Prefix of ``state.`` and ``param_groups`` in the keys of an optimizer of these parameters."""
    counts: dict[str, int] = {}
    for key in keys:
        parts = key.split(".")
        for index, part in enumerate(parts):
            prefix = "".join(f"{earlier}." for earlier in parts[:index])
            if part == "param_groups" or (part == "state" and params.find(".".join(parts[index + 1 : -1])) is not None):
                counts[prefix] = counts.get(prefix, 0) + 1
    return max(counts, key=lambda prefix: (counts[prefix], -len(prefix)), default=None)
