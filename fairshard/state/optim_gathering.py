"""Optimizer state under original names: whole, or as spans of this rank."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from fairshard.checks.agreement import raise_together
from fairshard.state.full_params import gather_params, spans_of
from fairshard.state.mixed_state import keys_of
from fairshard.state.optim_params import NamedParam, OptimParams
from fairshard.utils.collectives import Communicator
from fairshard.utils.dtensors import memory_of
from fairshard.utils.user_line import level_of_user

States = dict[nn.Parameter, dict[str, Any]]


class GatheredOptimState:
    """The state of ``optim``, which steps ``params``, under original names.

    ``saved`` is the result of ``optim.state_dict()``; if None, that is called. `check` compares the state across ranks.
    """

    def __init__(self, params: OptimParams, optim: Optimizer, saved: Mapping[str, Any] | None = None) -> None:
        self.params = params
        saved = optim.state_dict() if saved is None else saved
        self._saved = saved
        self._keys = self._keys_of(optim)
        self._states: States = {}
        self._others: dict[Any, Any] = {}
        by_key = {key: param for param, key in self._keys.items()}
        for key, value in saved["state"].items():
            if key in by_key:
                self._states[by_key[key]] = value
            else:
                self._others[key] = value
        if self._others:
            warnings.warn(
                f"Optimizer state {list(self._others)} belongs to no parameter of the model: it is copied unchanged.",
                stacklevel=level_of_user(),
            )

    def check(self) -> GatheredOptimState:
        """Compare the state across ranks before gathering it; returns itself. **Collective.**

        Raises:
            ValueError: on all ranks, if the state of a shard neither has the shard's shape nor is one value, or if a
                rank does not have the state that rank 0 has.
        """
        comms = self.params.comms
        problems = [problem_among(comm.gather_objects(self.described(comm))) for comm in comms]
        raise_together(comms if len(comms) > 1 else [], next((error for error in problems if error), None))
        return self

    def described(self, comm: Communicator) -> dict[str, str]:
        """Description of the state sharded over ``comm``, and of the groups of its parameters.

        It must be equal on the ranks of ``comm`` (see `problem_among`).
        """
        described = self._described_groups(comm)
        for named in self.params:
            if named.flat_param is not None and named.flat_param.comm is comm:
                for name, value in self._states.get(named.param, {}).items():
                    key = f"`{name}` of {', '.join(f'`{first}`' for first in named.first_names)}"
                    described[key] = _describe(value, named.param)
        return described

    def _described_groups(self, comm: Communicator) -> dict[str, str]:
        """The settings of the groups with parameters sharded over ``comm``, such as learning rates."""
        described: dict[str, str] = {}
        by_key = {key: self.params.of(param) for param, key in self._keys.items()}
        for group in self._saved.get("param_groups", ()):
            members = [by_key[key] for key in group["params"]]
            own = [named for named in members if named.flat_param is not None and named.flat_param.comm is comm]
            for name, value in group.items() if own else ():
                text = _setting(value)
                if name not in ("params", "param_names") and text is not None:
                    described[f"`{name}` of the group of `{own[0].first_names[0]}`"] = text
        return described

    def settings(self, num_ranks: int) -> dict[str, str]:
        """The settings of the groups, by place, if some parameter is cut among fewer than ``num_ranks`` ranks.

        Other ranks may have parameters of other names in a group of the same place: see `problem_of_places`.
        """
        cut = (named.flat_param for named in self.params)
        if not any(one is not None and one.comms.num_ranks < num_ranks for one in cut):
            return {}
        found: dict[str, str] = {}
        for place, group in enumerate(self._saved.get("param_groups", ())):
            texts = ((name, _setting(group[name])) for name in group.keys() - {"params", "param_names"})
            found.update({f"`{name}` of param group {place}": text for name, text in texts if text})
        return found

    def full(self, rank0_only: bool, offload_to_cpu: bool) -> dict[str, Any]:
        """State with whole values; with ``rank0_only`` an empty dict on the other ranks. **Collective.**"""
        state: dict[str, Any] = {}
        for named in self.params:
            own = self._states.get(named.param)
            if own is None:
                continue
            columns = {name: self._gather(named, value, rank0_only, offload_to_cpu) for name, value in own.items()}
            for index, (name, shape) in enumerate(zip(named.first_names, named.shapes, strict=True)):
                keys = keys_of(shape, own)
                state[name] = {key: values[index] for key, values in columns.items() if values and key in keys}
        is_left_out = rank0_only and any(root.units[0].group.rank != 0 for root in self.params.roots)
        return {} if is_left_out else self._with_groups(state)

    def sharded(self, offload_to_cpu: bool, copies: bool = True) -> dict[str, Any]:
        """State with this rank's parts of the values; without ``copies``, views of the state. No communication.

        Raises:
            ValueError: a value of this rank is quantised in blocks.
        """
        state: dict[str, Any] = {}
        for named in self.params:
            own = self._states.get(named.param)
            if own is None:
                continue
            for name, value in own.items():
                if _is_quantised(value, named.param):
                    raise _not_by_name(f"`{name}` of `{named.first_names[0]}` {_QUANTISED}")
            if copies:
                own = {name: _copied(value, offload_to_cpu) for name, value in own.items()}
            columns = {name: _own_runs(named, value) for name, value in own.items()}
            for index, (name, shape) in enumerate(zip(named.first_names, named.shapes, strict=True)):
                keys = keys_of(shape, own)
                state[name] = {key: values[index] for key, values in columns.items() if key in keys}
        return self._with_groups(state)

    def _gather(self, named: NamedParam, value: Any, rank0_only: bool, offload_to_cpu: bool) -> list[Any]:
        """``value`` for each original parameter; empty if only rank 0 gets it."""
        flat_param = named.flat_param
        if flat_param is None or not _is_run(value):
            return [_copied(value, offload_to_cpu) for _ in named.names]
        return gather_params(flat_param, value, rank0_only, offload_to_cpu)

    def _with_groups(self, state: dict[str, Any]) -> dict[str, Any]:
        names = self.params.in_order(state)
        gathered: dict[str, Any] = {"state": {name: state[name] for name in names}}
        gathered["state"].update(copy.deepcopy(self._others))
        if "param_groups" not in self._saved:
            return gathered
        by_key = {key: self.params.of(param) for param, key in self._keys.items()}
        groups = []
        for group in self._saved["param_groups"]:
            names = self.params.in_order(name for key in group["params"] for name in by_key[key].first_names)
            kept = {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({**kept, "params": names})
        return {**gathered, "param_groups": groups}

    def _keys_of(self, optim: Optimizer) -> dict[nn.Parameter, Any]:
        """Key of each parameter in the saved state: its number, or its name (torchrec's optimizers)."""
        params = [param for group in optim.param_groups for param in group["params"]]
        for param in params:
            self.params.of(param)
        saved = [key for group in self._saved.get("param_groups", []) for key in group["params"]]
        if not any(isinstance(key, str) for key in saved or self._saved["state"]):
            return {param: index for index, param in enumerate(params)}
        names = {param: name for name, param in self.params.model.named_parameters()}
        unknown = [key for key in saved if key not in names.values()]
        if unknown:
            raise ValueError(
                f"The names in an optimizer's param groups must be among `model.named_parameters()`, but "
                f"{unknown[0]!r} is not. Build the named optimizer from the wrapped model's parameters."
            )
        return {param: names[param] for param in params}


def problem_among(every: list[dict[str, str]]) -> ValueError | None:
    """The error for optimizer state that the ranks of a group have `described`; None if it is consistent."""
    for rank, own in enumerate(every):
        for key, kind in own.items():
            if kind.startswith("!"):
                return _not_by_name(f"{key} on rank {rank} {kind[1:]}")
        for key in [*every[0], *own]:
            if own.get(key) != every[0].get(key):
                return ValueError(
                    f"All ranks must have the same optimizer state, but {key} is "
                    f"{every[0].get(key, 'absent')} on rank 0 and {own.get(key, 'absent')} on rank {rank}. "
                    "Step the optimizer on every rank, and for the same parameters; step a scheduler with the same "
                    "values on every rank."
                )
    return None


def problem_of_places(every: list[dict[str, str]]) -> ValueError | None:
    """The error for `GatheredOptimState.settings` that differ among ranks; None if none do."""
    known: dict[str, tuple[int, str]] = {}
    for rank, own in enumerate(every):
        for key, text in own.items():
            first, other = known.setdefault(key, (rank, text))
            if other != text:
                return ValueError(
                    "Param groups of one place must have the same settings on all ranks, because a checkpoint holds "
                    f"one of them, but {key} is {other} on rank {first} and {text} on rank {rank}. Give parameters "
                    "with settings of their own a place of their own, where other ranks have a group without any."
                )
    return None


def _not_by_name(what: str) -> ValueError:
    return ValueError(
        f"Optimizer state must have its shard's shape or be one value, but {what}. State in blocks (8-bit optimizers) "
        "or in lists cannot be named by parameter: save `optimizer.state_dict()` on each rank, and load it there."
    )


_QUANTISED = "is quantised in blocks"
_PLAIN = (bool, int, float, str, type(None))


def _is_quantised(value: Any, shard: nn.Parameter) -> bool:
    """Whether ``value`` holds other tensors, as torchao's optimizer state does, and not because the shard does."""
    if not isinstance(value, Tensor):
        return False
    own, like = memory_of(value), memory_of(shard)
    return is_traceable_wrapper_subclass(own) and not is_traceable_wrapper_subclass(like)


def _is_run(value: Any) -> bool:
    return isinstance(value, DTensor) or (isinstance(value, Tensor) and value.dim() > 0)


def _describe(value: Any, shard: nn.Parameter) -> str:
    """Description of ``value`` that must be equal on all ranks; if it begins with ``!``, a problem."""
    if _is_quantised(value, shard):
        return f"!{_QUANTISED}"
    if isinstance(value, Tensor):
        if value.dim() and value.shape != shard.shape:
            return f"!has shape {tuple(value.shape)} while the shard has {tuple(shard.shape)}"
        return f"{value.dtype} by element" if _is_run(value) else f"{value.item()} ({value.dtype})"
    if any(isinstance(leaf, Tensor) and leaf.dim() for leaf in tree_leaves(value)):
        return f"!is a {type(value).__name__} of tensors"
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__


def _setting(value: Any) -> str | None:
    """A group's setting in words if it is one value or a few, such as betas; otherwise None."""
    if isinstance(value, Tensor):
        return None if value.dim() else repr(value.item())
    is_plain = all(isinstance(one, _PLAIN) for one in (value if isinstance(value, (tuple, list)) else (value,)))
    return repr(value) if is_plain else None


def _copied(value: Any, offload_to_cpu: bool) -> Any:
    if isinstance(value, Tensor):
        return value.to("cpu" if offload_to_cpu else value.device, copy=True)
    return copy.deepcopy(value)


def _own_runs(named: NamedParam, value: Any) -> list[Any]:
    """This rank's run of ``value`` for each original parameter."""
    if named.flat_param is None or not _is_run(value):
        return [value for _ in named.names]
    return list(spans_of(named.flat_param, value))
