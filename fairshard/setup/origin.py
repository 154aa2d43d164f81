"""The module that a unit was made from, the tensors that it must ignore, and its name in the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fairshard.engine.observer import Observer
from fairshard.engine.unit import Unit
from fairshard.params.flat_param import FlatParam
from fairshard.utils.names import join
from fairshard.utils.nested import apply_to_tensors


@dataclass(frozen=True)
class Ignored:
    """Tensors a unit ignores: those of ``modules`` with submodules, and ``params``, of these modules and of others."""

    modules: tuple[nn.Module, ...] = ()
    params: tuple[nn.Parameter, ...] = ()

    @property
    def ids(self) -> set[int]:
        """The ``id`` of each module and parameter."""
        return {id(item) for item in (*self.modules, *self.params)}

    def replaced(self, new: Mapping[int, nn.Parameter]) -> Ignored:
        """A copy in which ``new[id(param)]``, if present, replaces ``param``."""
        return Ignored(self.modules, tuple(new.get(id(param), param) for param in self.params))


NOTHING = Ignored()


def _counters_of(flat_params: Sequence[FlatParam]) -> list[int]:
    """The version counters of shards and of the parameters that are views of them."""
    return [tensor._version for flat_param in flat_params for tensor in flat_param.shows.versioned]


@dataclass
class Origin:
    """How the module of a unit was prepared for sharding; the unit computes on ``device``.

    ``is_placed``: the user chose the device. ``moves_inputs``: a forward moves its inputs there. ``sums``: if ranks
    may have begun with different values, a checksum of each parameter until they are compared. ``observers(units,
    comms)``: makes those of the model of which this unit is the outermost; see `Root`. ``ignored_places``: modules that
    hold ignored parameters and modules, and the names there. ``known``: the modules and parameters that the model had
    when it was last checked for new ones.
    """

    device: torch.device
    ignored: Ignored
    is_placed: bool
    moves_inputs: bool
    sums: dict[str, Tensor]
    observers: Callable[..., list[Observer]]
    ignored_places: Sequence[tuple[nn.Module, str]] = ()
    known: Any = None
    _versions: list[int] = field(default_factory=list)

    def note_cut(self, flat_params: Sequence[FlatParam]) -> None:
        """The shards of ``flat_params`` have just been cut."""
        self._versions = _counters_of(flat_params)

    def has_changed(self, flat_params: Sequence[FlatParam]) -> bool:
        """Whether a shard was written to after `note_cut`."""
        return self._versions != _counters_of(flat_params)

    def without_ignored(self, modules: list[nn.Module]) -> list[nn.Module]:
        """Those of ``modules`` that are not ignored."""
        ignored = self.ignored.ids
        return [module for module in modules if id(module) not in ignored]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "sums": {}, "known": None}


def move_inputs(inputs: Any, device: torch.device) -> Any:
    """Move every tensor in ``inputs`` to ``device``, differentiably; containers keep their types.

    To the CPU it waits: operators there do not wait for a copy.
    """
    return apply_to_tensors(lambda tensor: tensor.to(device, non_blocking=device.type != "cpu"), inputs)


def place(unit: Unit, fqn: str) -> None:
    """Give ``unit`` the name ``fqn`` that it has in the whole model, and rename its parameters to match."""
    if fqn != unit.fqn:
        for flat_param in unit.flat_params:
            flat_param.name = renamed(flat_param.name, unit.fqn, fqn)
            for slot in flat_param.slots:
                slot.fqn = renamed(slot.fqn, unit.fqn, fqn)
                if slot.placeholder is not None:
                    slot.placeholder.fqn = slot.fqn
    unit.fqn = fqn


def renamed(name: str, before: str, after: str) -> str:
    """``name``, inside a unit called ``before``, after the unit is renamed to ``after``."""
    for old, new in zip(before.split(", "), after.split(", "), strict=False):
        if not old:
            return join(new, name)
        if name.startswith(f"{old}."):
            return join(new, name[len(old) + 1 :])
    return name
