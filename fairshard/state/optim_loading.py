"""Convert optimizer state under original names, whole or in spans, to the state of shards."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from fairshard.checks.agreement import raise_together
from fairshard.errors import MixedGroupsError
from fairshard.state.full_params import scatter_params, spans_of
from fairshard.state.optim_params import Groups, NamedParam, OptimParams, ids_of, keys_of
from fairshard.utils.dtensors import are_placed_alike, memory_of, placed_as
from fairshard.utils.messages import broadcast_object
from fairshard.utils.names import clean_tensor_name
from fairshard.utils.sharded_tensors import gathered
from fairshard.utils.span_tensor import SpanTensor
from fairshard.utils.user_line import level_of_user
from fairshard.views.orig_param import Stepped

# State that torch's optimizers keep as one value per parameter, in 0-dim tensors.
SCALARS = {"step", "mu_product", "eta", "mu"}

Entries = list[Mapping[str, Any] | None]
"""The state of each original parameter of a shard; None if it has none."""


class Source(Enum):
    """The ranks that have the state to load."""

    EVERY_RANK = auto()
    FIRST_RANK = auto()
    THIS_RANK = auto()  # which alone makes its state, from whole values: no communication


class ShardedOptimState:
    """Makes state dicts that an optimizer of a sharded model can load.

    **Collective** to construct, unless ``source`` is this rank.
    """

    def __init__(self, model: nn.Module, source: Source = Source.EVERY_RANK, adopts: bool = False) -> None:
        self._params = OptimParams(model, is_local=source is Source.THIS_RANK)
        self._is_from_first = source is Source.FIRST_RANK
        self._adopts = adopts

    def make(self, saved: Any, groups: Groups, key_of: Mapping[nn.Parameter, Any] | None = None) -> dict[str, Any]:
        """The state of the parameters in ``groups``, keyed by their numbers or by ``key_of``.

        Tensor values of ``saved`` are whole, spans that this rank owns, or ``ShardedTensor`` of FSDP1. The result is in
        new memory, unless ``adopts`` was set and the spans lie in one shard: then it is that shard.
        **Collective** if only rank 0 has the values, or if they are ``DTensor`` or ``ShardedTensor``.

        Raises:
            ValueError: ``saved`` is not optimizer state, or its entries do not combine into the state of one shard.
        """
        made: dict[str, Any] = {}
        error: Exception | None = None
        saved = _with_clean_names(saved)
        values = self._skeleton(saved) if self._is_from_first else saved
        try:
            _check_form(values)
            self._scalars = self._find_scalars(values["state"])
            keys = ids_of(groups) if key_of is None else key_of
            named = {self._params.of(param): keys[param] for group in groups for param in group}
            made["state"] = self._states(saved, values["state"], named)
            if "param_groups" in values:
                made["param_groups"] = self._groups(values, groups, keys)
        except (KeyError, TypeError, ValueError) as raised:
            error = raised
        raise_together(self._params.comms, error)
        return made

    def _states(self, saved: Any, values: Mapping[Any, Any], keys: Mapping[NamedParam, Any]) -> dict[Any, Any]:
        """The state of the parameters in ``keys``; ``values`` are those of ``saved``, or their skeleton from rank 0."""
        state: dict[Any, Any] = {}
        for named in self._params:
            entries = _entries(values, named)
            if named in keys and any(entries):
                is_first = named.flat_param is not None and named.flat_param.line.rank == 0
                given = saved["state"] if is_first or not self._is_from_first else {}
                state[keys[named]] = self._state_of(named, entries, _entries(given, named))
        for key in values.keys() - {name for named in self._params for names in named.names for name in names}:
            warnings.warn(
                f"Optimizer state `{key}` belongs to no parameter of the model: it is copied unchanged.",
                stacklevel=level_of_user(),
            )
            state[key] = copy.deepcopy(values[key])
        return state

    def _skeleton(self, saved: Any) -> Any:
        """Broadcast rank 0's state to every rank, with meta tensors in place of sharded state."""
        if len(self._params.comms) != 1:
            raise MixedGroupsError(
                "Optimizer state on rank 0 alone needs a model on one process group, but the units of this one use "
                "several, each with its own rank 0. Load it on every rank."
            )
        comm = self._params.comms[0]
        own: Any = saved if comm.rank == 0 else None
        if isinstance(own, Mapping) and isinstance(own.get("state"), Mapping):
            try:
                own = {**own, "state": {key: self._without_elements(key, entry) for key, entry in own["state"].items()}}
            except ValueError as error:  # raised on all ranks
                own = error
        own = tree_map_only(Tensor, lambda value: value if value.is_meta else value.cpu(), own)
        return broadcast_object(own, comm.group)

    def _without_elements(self, name: Any, entry: Any) -> Any:
        named = self._params.find(name) if isinstance(name, str) else None
        if named is None or named.flat_param is None or not isinstance(entry, Mapping):
            return entry
        kept = dict(entry)
        for key, value in entry.items():
            if isinstance(value, (SpanTensor, DTensor, ShardedTensor)) and value.dim():
                raise ValueError(
                    f"State on rank 0 alone must be whole, but `{key}` of {named.words} is sharded. Use "
                    "flatten_sharded_optim_state_dict on every rank."
                )
            if isinstance(value, Tensor) and value.dim():
                kept[key] = torch.empty(value.shape, dtype=value.dtype, device="meta")
        return kept

    def _find_scalars(self, saved: Mapping[Any, Any]) -> set[str]:
        """Names of state that is one value: 0-dim for a parameter that is not 0-dim itself."""
        found: set[str] = set()
        for name, entry in saved.items():
            named = self._params.find(name) if isinstance(name, str) else None
            if named is not None and isinstance(entry, Mapping):
                shape = next(s for s, names in zip(named.shapes, named.names, strict=True) if name in names)
                found |= {key for key, value in entry.items() if shape and _shapes([value]) == [torch.Size()]}
        return found

    def _state_of(self, named: NamedParam, entries: Entries, given: Entries) -> dict[str, Any]:
        """The state of one shard; ``given`` are the entries with their elements, on the ranks that have these."""
        flat_param = named.flat_param
        if flat_param is None:
            return {key: copy.deepcopy(gathered(value)) for key, value in (entries[0] or {}).items()}
        keys = dict.fromkeys(key for entry in entries if entry is not None for key in entry)
        own = [keys_of(shape, keys) for shape in named.shapes]
        if any(entry is not None and entry.keys() != known for entry, known in zip(entries, own, strict=True)):
            found = sorted({", ".join(sorted(entry)) for entry in entries if entry is not None})
            raise ValueError(f"Parameters of one unit must have the same state, but {named.words} have {found}.")
        state: dict[str, Any] = {}
        for key in keys:
            values = _column(entries, key)
            if all(value is None for value in values):
                state[key] = None
            elif key not in self._scalars and is_elementwise(named, key, _shapes(values)):
                state[key] = self._place(flat_param, _column(given, key), _common_dtype(named, key, values))
            else:
                state[key] = _common_value(named, key, values, [key in known for known in own])
        return state

    def _place(self, flat_param: Stepped, values: list[Any], dtype: torch.dtype) -> Tensor:
        """This rank's shard ``[S]`` of ``values``, on the shard's device; missing values are zeros."""
        if self._adopts and (made := _shard_under(flat_param, values)) is not None:
            return made
        shard = zeros_like_shard(flat_param, dtype)
        if self._is_from_first:
            wholes = [
                torch.zeros(slot.shape, dtype=dtype, device="cpu") if value is None else value.to("cpu")
                for slot, value in zip(flat_param.slots, values, strict=True)
                if flat_param.line.rank == 0
            ]
            return shard.copy_(scatter_params(flat_param, wholes, dtype))
        for span, value in zip(spans_of(flat_param, shard), map(gathered, values), strict=True):
            if value is not None and isinstance(span, DTensor):
                span.copy_(placed_as(value, span))
            elif value is not None:
                span.copy_(value.full_tensor() if isinstance(value, DTensor) else value)
        return shard

    def _groups(self, values: Any, groups: Groups, keys: Mapping[nn.Parameter, Any]) -> list[dict[str, Any]]:
        """The saved hyperparameters of each of ``groups``, with the keys of its parameters.

        Groups of parameters that only other ranks have were saved with the names of those: then places count.
        """
        saved = list(values["param_groups"])
        settings = [{key: own for key, own in group.items() if key not in ("params", "param_names")} for group in saved]
        of_param: dict[NamedParam | None, set[int]] = {}
        for number, group in enumerate(saved):
            for name in group["params"]:
                of_param.setdefault(self._params.find(name), set()).add(number)
        made = []
        for index, params in enumerate(groups):
            members = list(map(self._params.of, params))
            found: list[dict[str, Any]] = []
            for number in sorted({number for named in members for number in of_param.get(named, ())}):
                if settings[number] not in found:
                    found.append(settings[number])
            if not found and len(saved) == len(groups):
                has_state = any(any(_entries(values["state"], named)) for named in members)
                found = [settings[index]] if has_state or not params or not saved[index]["params"] else []
            if len(found) != 1:
                problem = "they differ between its parameters" if found else "none of its parameters was saved"
                raise ValueError(
                    f"Each param group must have saved hyperparameters, but for group {index} {problem}. Build the "
                    "optimizer with the groups that were saved."
                )
            made.append({**copy.deepcopy(found[0]), "params": [keys[param] for param in params]})
        return made


_OF_A_CLASS = {"alpha", "betas", "dampening", "etas", "lambd", "lr_decay", "momentum", "momentum_decay", "rho"}
"""Hyperparameters that torch's optimizers have always had, each in some classes only."""
_OF_ADAM = "amsgrad"
"""A hyperparameter of torch's Adam that others' classes of that kind may lack, as may torch's own NAdam and RAdam."""
_OF_TORCH = "differentiable"
"""A hyperparameter of most optimizers of torch, and of few others."""


def check_of_class(made: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Check that ``made``, to be loaded into ``optimizer``, is not the state of an optimizer of another class.

    Raises:
        ValueError: its hyperparameters lack some that ``optimizer`` would read in its next step, or both are of torch
            and it has some that ``optimizer`` has not.
    """
    for index, group in enumerate(made.get("param_groups", ())):
        are_of_torch = _OF_TORCH in group and _OF_TORCH in optimizer.defaults
        compared = _OF_A_CLASS | {_OF_ADAM} if are_of_torch else _OF_A_CLASS
        missing = sorted((compared & optimizer.defaults.keys()) - group.keys())
        foreign = sorted((compared & group.keys()) - optimizer.defaults.keys()) if are_of_torch else ()
        if missing or foreign:
            names = ", ".join(f"`{name}`" for name in missing or foreign)
            problem = f"has no {names}" if missing else f"has {names}, which {type(optimizer).__name__} has not"
            raise ValueError(
                f"State to load into {type(optimizer).__name__} must be of the same optimizer, but saved group {index} "
                f"{problem}. It has {', '.join(f'`{name}`' for name in group if name != 'params')}. Build the "
                "optimizer that was saved, or load only the model."
            )


def zeros_like_shard(flat_param: Stepped, dtype: torch.dtype) -> Tensor:
    """Zeros in the shape of the shard, on its device, contiguous."""
    return torch.zeros_like(flat_param.shard.detach(), dtype=dtype, memory_format=torch.contiguous_format)


def is_elementwise(named: NamedParam, key: str, shapes: list[torch.Size]) -> bool:
    """Whether tensor state has one value per element: known by shape, or by name if all parameters are 0-dim."""
    return any(shapes) or (bool(shapes) and not any(named.shapes) and key not in SCALARS)


def _shard_under(flat_param: Stepped, values: list[Any]) -> Tensor | None:
    """The shard ``[S]`` whose runs are ``values``; None if they are not the runs of one shard."""
    if isinstance(flat_param.shard, DTensor):
        own = values[0]
        return own if isinstance(own, DTensor) and are_placed_alike(own, flat_param.shard) else None
    base = values[0].run._base if isinstance(values[0], SpanTensor) else None
    if base is None or base.shape != flat_param.shard.shape:
        return None
    runs = [memory_of(span).data_ptr() for span in spans_of(flat_param, base)]
    return base if runs == [v.run.data_ptr() if isinstance(v, SpanTensor) else -1 for v in values] else None


def _with_clean_names(saved: Any) -> Any:
    """``saved`` with its state under names stripped of wrappers."""
    if not isinstance(saved, Mapping) or not isinstance(saved.get("state"), Mapping):
        return saved
    state = {clean_tensor_name(key) if isinstance(key, str) else key: own for key, own in saved["state"].items()}
    return {**saved, "state": state}


def _check_form(saved: Any) -> None:
    if isinstance(saved, Exception):
        raise saved
    if not isinstance(saved, Mapping) or not isinstance(saved.get("state"), Mapping):
        found = sorted(saved) if isinstance(saved, Mapping) else type(saved).__name__
        raise ValueError(f'An optimizer state dict must have the key "state", but it is {found}.')
    if saved["state"] and all(isinstance(key, int) for key in saved["state"]):
        raise ValueError(
            "Optimizer state must be keyed by original parameter names, but is keyed by numbers. Use "
            "rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, unwrapped_model) first."
        )


def _entries(saved: Mapping[Any, Any], named: NamedParam) -> Entries:
    """The state saved for each original parameter, under any of its names; None if missing or empty."""
    return [next((saved[name] for name in names if saved.get(name)), None) for names in named.names]


def _column(entries: Entries, key: str) -> list[Any]:
    return [None if entry is None else entry.get(key) for entry in entries]


def _shapes(values: list[Any]) -> list[torch.Size]:
    return [value.shape for value in values if isinstance(value, Tensor)]


def _common_dtype(named: NamedParam, key: str, values: list[Any]) -> torch.dtype:
    """The common dtype of tensor state, which some parameters may not have; also checks its shapes."""
    given = [value for value in values if value is not None]
    kinds = {value.dtype if isinstance(value, Tensor) else type(value).__name__ for value in given}
    dtype = next(iter(kinds))
    if len(kinds) > 1 or not isinstance(dtype, torch.dtype):
        found = sorted(map(str, kinds))
        raise ValueError(f"State `{key}` of one unit must have one dtype, but that of {named.words} has {found}.")
    for name, shape, value in zip(named.first_names, named.shapes, values, strict=True):
        if value is not None and value.shape != shape:
            raise ValueError(
                f"State `{key}` must have its parameter's shape, but for `{name}` has {tuple(value.shape)} while the "
                f"parameter has {tuple(shape)}."
            )
    return dtype


def _common_value(named: NamedParam, key: str, values: list[Any], wanted: list[bool]) -> Any:
    """A value shared by all ``wanted`` parameters of a unit, such as a step count; empty ones may not have it."""
    found = zip(named.first_names, named.shapes, values, wanted, strict=True)
    of_param = {name: value for name, shape, value, own in found if own and (shape.numel() or value is not None)}
    missing = [f"`{name}`" for name, value in of_param.items() if value is None]
    if missing:
        raise ValueError(
            f"State `{key}` must be present for all parameters of a unit, but is missing for {', '.join(missing)}: one "
            f"value is shared by {named.words}."
        )
    first_name, first = next(iter(of_param.items()))
    for name, value in of_param.items():
        if type(value) is not type(first) or not _equal(value, first):
            raise ValueError(
                f"State `{key}` must be equal for all parameters of a unit, but is {first} for `{first_name}` and "
                f"{value} for `{name}`. Wrap them separately, or set flatten_parameters=False."
            )
    return first.detach().clone() if isinstance(first, Tensor) else copy.deepcopy(first)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())
    return bool(a == b)
