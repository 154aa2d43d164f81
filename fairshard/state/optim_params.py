"""The parameters that an optimizer of a sharded model steps, under the names of the unsharded model.

Some flat shards are stepped by two rules, Muon's for matrices and AdamW's for all other parameters. Such a shard has
the state of both for all its elements; under original names each parameter has its own rule's (`keys_of`).
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fairshard.engine.tree import units_below, walk
from fairshard.setup.arguments import check_module
from fairshard.setup.claim import roots_below
from fairshard.utils.collectives import Communicator
from fairshard.utils.names import clean_tensor_name, join
from fairshard.utils.user_line import level_of_user
from fairshard.views.orig_param import Stepped

Groups = list[list[nn.Parameter]]


@dataclass(frozen=True, eq=False)
class NamedParam:
    """A parameter that an optimizer sees: the shard of one or several original parameters, or a whole parameter.

    ``flat_param`` is the owner of the shard. ``names`` has all names of each original parameter; state uses the first.
    """

    param: nn.Parameter
    flat_param: Stepped | None
    names: tuple[tuple[str, ...], ...]

    @property
    def first_names(self) -> list[str]:
        """Name of each original parameter in state dicts."""
        return [names[0] for names in self.names]

    @property
    def words(self) -> str:
        """The names, for messages."""
        return ", ".join(f"`{name}`" for name in self.first_names)

    def is_over(self, comm: Communicator) -> bool:
        """Whether the parameter is cut among the ranks of ``comm``."""
        return self.flat_param is not None and self.flat_param.comm is comm

    @property
    def shapes(self) -> list[torch.Size]:
        """Shape of each original parameter."""
        if not self.flat_param:
            return [self.param.shape]
        return [slot.leaf.shape if slot.has_mesh else slot.shape for slot in self.flat_param.slots]


class OptimParams:
    """All parameters of ``model``, sharded or not. **Collective** on the first use of a model, unless ``is_local``.

    ``is_local``: no communication; `roots` and `comms` are empty.
    """

    def __init__(self, model: nn.Module, is_local: bool = False) -> None:
        check_module(model)
        self.model = model
        self.roots = [] if is_local else roots_below(model)
        self._places: dict[str, int] = {}  # index of each name in the unwrapped model
        self._by_param: dict[nn.Parameter, NamedParam] = {}
        self._by_name: dict[str, NamedParam] = {}
        places = {id(module): (place, fqn) for place, (fqn, module) in enumerate(walk(model))}
        for stepped in (one for _, unit in units_below(model) for fp in unit.flat_params for one in fp.stepped):
            names = []
            for slot in stepped.slots:
                owners = ((*places[id(part)], name) for part, name in slot.owners if id(part) in places)
                names.append([join(fqn, name) for _, fqn, name in sorted(owners, key=itemgetter(0))])
            self._add(stepped.shard, stepped, names)
        whole: dict[nn.Parameter, list[str]] = {}
        for fqn, module in walk(model):
            for name, param in module._parameters.items():
                if param is not None and param not in self._by_param:
                    whole.setdefault(param, []).append(join(fqn, name))
                self._places.setdefault(clean_tensor_name(join(fqn, name)), len(self._places))
        for param, own in whole.items():
            self._add(param, None, [own])

    def _add(self, param: nn.Parameter, flat_param: Stepped | None, names: list[list[str]]) -> None:
        cleaned = tuple(tuple(map(clean_tensor_name, own)) for own in names)
        named = NamedParam(param, flat_param, cleaned)
        self._by_param[param] = named
        self._by_name.update({name: named for names in cleaned for name in names})

    @property
    def comms(self) -> list[Communicator]:
        """The process groups of all units, each once."""
        return list(dict.fromkeys(unit.comm for root in self.roots for unit in root.units if unit.comm is not None))

    def __iter__(self) -> Iterator[NamedParam]:
        """Every parameter once, sharded ones first."""
        return iter(self._by_param.values())

    def of(self, param: Any) -> NamedParam:
        """The entry of a parameter that an optimizer holds.

        Raises:
            ValueError: ``param`` is not a parameter of the model.
        """
        found = self._by_param.get(param) if isinstance(param, nn.Parameter) else None
        if found is None:
            shape = tuple(param.shape) if isinstance(param, Tensor) else param
            raise ValueError(
                f"An optimizer's parameters must belong to `model`, but one of shape {shape} does not. Build the "
                "optimizer after wrapping, from the parameters of the same model."
            )
        return found

    def find(self, name: str) -> NamedParam | None:
        """The entry of the parameter with an original name; None if unknown."""
        return self._by_name.get(clean_tensor_name(name))

    def in_order(self, names: Iterable[str]) -> list[str]:
        """``names`` in the order of the unwrapped model, which numbers its optimizer's parameters."""
        return sorted(names, key=lambda name: self._places.get(name, len(self._places)))

    def groups_of(self, optim: Optimizer | None, optim_input: Any = None) -> Groups:
        """The parameters of each group of ``optim`` or of ``optim_input``; if both are None, all in one group.

        Raises:
            TypeError, ValueError, KeyError: an optimizer could not be built from ``optim_input``.
        """
        if optim_input is not None:
            return _groups_of_input(optim_input)
        if optim is None:
            return [list(self.model.parameters())]
        return [list(group["params"]) for group in optim.param_groups]


def ids_of(groups: Groups) -> dict[nn.Parameter, int]:
    """Number of each parameter in an optimizer's state dict."""
    return {param: index for index, param in enumerate(param for group in groups for param in group)}


def _groups_of_input(optim_input: Any) -> Groups:
    warnings.warn(
        "`optim_input` is deprecated: pass `optim`, whose param groups cannot be wrong.",
        FutureWarning,
        stacklevel=level_of_user(),
    )
    if isinstance(optim_input, (Tensor, dict, str)) or not isinstance(optim_input, Iterable):
        raise TypeError(
            "`optim_input` must be an iterable of parameters or of param groups, but is "
            f"{type(optim_input).__name__}. Pass the optimizer's own input, or `optim`."
        )
    entries = list(optim_input)
    if not entries:
        raise ValueError("`optim_input` must hold a parameter, but is empty. A generator can be used up: pass a list.")
    if all(isinstance(entry, Tensor) for entry in entries):
        return [entries]
    if not all(isinstance(entry, dict) for entry in entries):
        found = sorted({type(entry).__name__ for entry in entries})
        raise TypeError(f"`optim_input` must hold parameters only or param groups only, but holds {', '.join(found)}.")
    for index, group in enumerate(entries):
        if "params" not in group:
            raise KeyError(f'A param group must have the key "params", but group {index} has {sorted(group)}.')
    every = [group["params"] for group in entries]
    return [[params] if isinstance(params, nn.Parameter) else list(params) for params in every]


_OF_MATRICES = {"momentum_buffer"}
_OF_OTHERS = {"step", "exp_avg", "exp_avg_sq"}


def is_matrix(shape: torch.Size) -> bool:
    """Whether Muon steps a parameter of this shape as a matrix, or as a stack of matrices."""
    return len(shape) in (2, 3)


def keys_of(shape: torch.Size, keys: Collection[str]) -> set[str]:
    """Those of ``keys``, the state of a shard, that a parameter of ``shape`` has."""
    if set(keys) != _OF_MATRICES | _OF_OTHERS:
        return set(keys)
    return _OF_MATRICES if is_matrix(shape) else _OF_OTHERS


class OptimStateKeyType(Enum):
    """Kind of the keys of optimizer state."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


def rekey(
    saved: dict[str, Any], key_type: Any, model: nn.Module, optim: Optimizer | None, optim_input: Any
) -> dict[str, Any]:
    """``saved`` with keys of ``key_type``; ``saved`` itself if it already has them. ``model`` is not wrapped.

    Raises:
        TypeError: ``key_type`` is not an `OptimStateKeyType`.
        ValueError: the keys mix names and numbers, or a key belongs to no parameter.
    """
    wanted = OptimStateKeyType.__members__.get(getattr(key_type, "name", ""))
    if wanted is None:
        raise TypeError(
            "`optim_state_key_type` must be OptimStateKeyType.PARAM_NAME or OptimStateKeyType.PARAM_ID, but is "
            f"{key_type!r}."
        )
    used = [*saved["state"], *(key for group in saved.get("param_groups", []) for key in group["params"])]
    kinds = {type(key) for key in used}
    if kinds not in ({int}, {str}, set()):
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(f"The keys of optimizer state must be all numbers or all names, but are {names}.")
    if not kinds or kinds == ({int} if wanted is OptimStateKeyType.PARAM_ID else {str}):
        return saved
    params = OptimParams(model)
    numbers = ids_of(params.groups_of(optim, optim_input))
    if any(len(named.names) > 1 for named in params):
        raise ValueError(
            "`model` must be the unwrapped module, whose optimizer numbers original parameters, but it has units of "
            "several parameters. Pass a module built as before wrapping."
        )
    new_keys: Mapping[Any, Any] = {number: params.of(param).first_names[0] for param, number in numbers.items()}
    if wanted is OptimStateKeyType.PARAM_ID:
        new_keys = {name: number for number, name in new_keys.items()}
    unknown = [key for key in used if key not in new_keys]
    if unknown:
        raise ValueError(
            f"Every key of optimizer state must be a parameter of `model`, which has {len(new_keys)}, but "
            f"{unknown[0]!r} is not. Pass the unwrapped model that the state belongs to."
        )
    return with_keys(saved, new_keys, sorted)


def with_keys(saved: Mapping[str, Any], new_keys: Mapping[Any, Any], order: Any = list) -> dict[str, Any]:
    """``saved`` with each key replaced by that in ``new_keys``, in ``order`` in each group."""
    made: dict[str, Any] = {"state": {new_keys[key]: own for key, own in saved["state"].items()}}
    if "param_groups" in saved:
        groups = saved["param_groups"]
        made["param_groups"] = [{**one, "params": order(new_keys[key] for key in one["params"])} for one in groups]
    return made
