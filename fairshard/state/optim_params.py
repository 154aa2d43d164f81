"""The parameters that an optimizer of a sharded model steps, under the names of the unsharded model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
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
        fqns = {id(module): fqn for fqn, module in walk(model)}
        places = {key: place for place, key in enumerate(fqns)}
        for _, unit in units_below(model):
            for flat_param in unit.flat_params:
                for stepped in flat_param.stepped:
                    names = []
                    for slot in stepped.slots:  # units outside ``model`` may share it
                        inside = [pair for pair in slot.owners if id(pair[0]) in fqns]
                        inside.sort(key=lambda pair: places[id(pair[0])])
                        names.append([(fqns[id(part)], name) for part, name in inside])
                    self._add(stepped.shard, stepped, names)
        whole: dict[nn.Parameter, list[tuple[str, str]]] = {}
        for fqn, module in walk(model):
            for name, param in module._parameters.items():
                if param is not None and param not in self._by_param:
                    whole.setdefault(param, []).append((fqn, name))
                self._places.setdefault(clean_tensor_name(join(fqn, name)), len(self._places))
        for param, pairs in whole.items():
            self._add(param, None, [pairs])

    def _add(self, param: nn.Parameter, flat_param: Stepped | None, names: list[list[tuple[str, str]]]) -> None:
        cleaned = tuple(tuple(clean_tensor_name(join(*pair)) for pair in pairs) for pairs in names)
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
    entries: Sequence[Any] = list(optim_input)
    if not entries:
        raise ValueError("`optim_input` must hold a parameter, but is empty. A generator can be used up: pass a list.")
    if all(isinstance(entry, Tensor) for entry in entries):
        return [list(entries)]
    if not all(isinstance(entry, dict) for entry in entries):
        found = sorted({type(entry).__name__ for entry in entries})
        raise TypeError(f"`optim_input` must hold parameters only or param groups only, but holds {', '.join(found)}.")
    groups: Groups = []
    for index, group in enumerate(entries):
        if "params" not in group:
            raise KeyError(f'A param group must have the key "params", but group {index} has {sorted(group)}.')
        params = group["params"]
        groups.append([params] if isinstance(params, nn.Parameter) else list(params))
    return groups
