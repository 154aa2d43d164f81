"""Optimizer state under original names: whole, or as spans of this rank.

State is a table of values by parameter and key. A value is a *run*, with one number for each element of a shard; or one
value for all of the shard's parameters, such as a count of steps.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from fairshard.checks.agreement import raise_together
from fairshard.state.full_params import gather_params, spans_of
from fairshard.state.optim_params import OptimParams, keys_of
from fairshard.utils.collectives import Communicator
from fairshard.utils.dtensors import memory_of
from fairshard.utils.user_line import level_of_user
from fairshard.views.orig_param import Stepped


class GatheredOptimState:
    """The state of ``optim``, which steps ``params``, under original names.

    ``saved`` is the result of ``optim.state_dict()``; if None, that is called. `check` compares the state across ranks.
    """

    def __init__(self, params: OptimParams, optim: Optimizer, saved: Mapping[str, Any] | None = None) -> None:
        self.params = params
        self._saved = saved = optim.state_dict() if saved is None else saved
        self._named = {key: params.of(param) for key, param in self._params_by_key(optim).items()}
        by_param = {named.param: saved["state"][key] for key, named in self._named.items() if key in saved["state"]}
        self._states = [(named, by_param[named.param]) for named in params if named.param in by_param]
        self._others = {key: value for key, value in saved["state"].items() if key not in self._named}
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
        raise_together(comms if len(comms) > 1 else [], next(filter(None, problems), None))
        return self

    def described(self, comm: Communicator) -> dict[str, str]:
        """Description of the state sharded over ``comm``, and of the groups of its parameters, such as learning rates.

        It must be equal on the ranks of ``comm`` (see `problem_among`).
        """
        described: dict[str, str] = {}
        for group in self._saved.get("param_groups", ()):
            own = [named for named in map(self._named.__getitem__, group["params"]) if named.is_over(comm)]
            for name, text in _settings(group).items() if own else ():
                described[f"`{name}` of the group of `{own[0].first_names[0]}`"] = text
        for named, state in self._states:
            for name, value in state.items() if named.is_over(comm) else ():
                described[f"`{name}` of {named.words}"] = _describe(value, named.param)
        return described

    def settings(self, num_ranks: int) -> dict[str, str]:
        """The settings of the groups, by place, if some parameter is cut among fewer than ``num_ranks`` ranks.

        Other ranks may have parameters of other names in a group of the same place: see `problem_of_places`.
        """
        cut = (named.flat_param for named in self.params)
        if not any(one is not None and one.comms.num_ranks < num_ranks for one in cut):
            return {}
        groups = enumerate(self._saved.get("param_groups", ()))
        return {f"`{name}` of param group {n}": text for n, group in groups for name, text in _settings(group).items()}

    def full(self, rank0_only: bool, offload_to_cpu: bool) -> dict[str, Any]:
        """State with whole values; with ``rank0_only`` an empty dict on the other ranks. **Collective.**"""

        def whole(flat_param: Stepped, run: Any) -> list[Any]:
            return gather_params(flat_param, run, rank0_only, offload_to_cpu)

        made = self._by_name(whole, lambda value: _copied(value, offload_to_cpu))
        is_left_out = rank0_only and any(root.units[0].group.rank != 0 for root in self.params.roots)
        return {} if is_left_out else made

    def sharded(self, offload_to_cpu: bool, copies: bool = True) -> dict[str, Any]:
        """State with this rank's parts of the values; without ``copies``, views of the state. No communication.

        Raises:
            ValueError: a value of this rank is quantised in blocks.
        """

        def owned(value: Any) -> Any:
            return _copied(value, offload_to_cpu) if copies else value

        for named, state in self._states:
            for name in (name for name, value in state.items() if _is_quantised(value, named.param)):
                raise _not_by_name(f"`{name}` of `{named.first_names[0]}` {_QUANTISED}")
        return self._by_name(lambda flat_param, run: list(spans_of(flat_param, owned(run))), owned)

    def _by_name(self, split: Callable[[Stepped, Any], list[Any]], owned: Callable[[Any], Any]) -> dict[str, Any]:
        """The table by name: runs as ``split`` returns them for each parameter, if it returns any; others ``owned``."""
        state: dict[str, Any] = {}
        for named, own in self._states:
            cut = named.flat_param
            columns = {
                key: [owned(value) for _ in named.names] if cut is None or not _is_run(value) else split(cut, value)
                for key, value in own.items()
            }
            for index, (name, shape) in enumerate(zip(named.first_names, named.shapes, strict=True)):
                keys = keys_of(shape, own)
                state[name] = {key: values[index] for key, values in columns.items() if values and key in keys}
        in_order = {name: state[name] for name in self.params.in_order(state)}
        made: dict[str, Any] = {"state": {**in_order, **copy.deepcopy(self._others)}}
        if "param_groups" in self._saved:
            made["param_groups"] = list(map(self._group, self._saved["param_groups"]))
        return made

    def _group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        names = self.params.in_order(name for key in group["params"] for name in self._named[key].first_names)
        kept = {key: value for key, value in group.items() if key not in _NAMES}
        return {**copy.deepcopy(kept), "params": names}

    def _params_by_key(self, optim: Optimizer) -> dict[Any, Any]:
        """The parameters by their keys in the saved state: numbers, or names (torchrec's optimizers)."""
        params = [param for group in optim.param_groups for param in group["params"]]
        saved = [key for group in self._saved.get("param_groups", []) for key in group["params"]]
        if not any(isinstance(key, str) for key in saved or self._saved["state"]):
            return dict(enumerate(params))
        names = {param: name for name, param in self.params.model.named_parameters()}
        unknown = [key for key in saved if key not in names.values()]
        if unknown:
            raise ValueError(
                f"The names in an optimizer's param groups must be among `model.named_parameters()`, but "
                f"{unknown[0]!r} is not. Build the named optimizer from the wrapped model's parameters."
            )
        return {names[self.params.of(param).param]: param for param in params}


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
_NAMES = ("params", "param_names")
_PLAIN = (bool, int, float, str, type(None))


def _is_quantised(value: Any, shard: Tensor) -> bool:
    """Whether ``value`` holds other tensors, as torchao's optimizer state does, and not because the shard does."""
    if not isinstance(value, Tensor):
        return False
    return is_traceable_wrapper_subclass(memory_of(value)) and not is_traceable_wrapper_subclass(memory_of(shard))


def _is_run(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.dim() > 0 or isinstance(value, DTensor))


def _describe(value: Any, shard: Tensor) -> str:
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


def _settings(group: Mapping[str, Any]) -> dict[str, str]:
    """Those settings of a param group that are one value or a few, such as betas, in words."""
    given = ((name, value) for name, value in group.items() if name not in _NAMES)
    plain = {name: value.item() if isinstance(value, Tensor) and not value.dim() else value for name, value in given}
    return {name: repr(value) for name, value in plain.items() if all(isinstance(one, _PLAIN) for one in _each(value))}


def _each(value: Any) -> Any:
    return value if isinstance(value, (tuple, list)) else (value,)


def _copied(value: Any, offload_to_cpu: bool) -> Any:
    if isinstance(value, Tensor):
        return value.to("cpu" if offload_to_cpu else value.device, copy=True)
    return copy.deepcopy(value)
