"""The modules and units of a module that will be sharded, found once."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fairshard.engine.tree import named_units, unit_of, walk
from fairshard.params.flat_param import FlatParam
from fairshard.params.slot import ParamSlot
from fairshard.setup.origin import place
from fairshard.utils.names import join


class Survey:
    """What is in ``module``, once for all who ask before it is sharded.

    Attributes:
        parts: ``(fqn, module)`` of each module, outermost first.
        units: ``(fqn, unit)`` of each unit, outermost first.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.look()

    def look(self) -> None:
        """Find the modules and units anew, because something has been called that may replace them."""
        self.parts = list(walk(self.module))
        self.units = named_units(self.parts)

    @property
    def flat_params(self) -> list[FlatParam]:
        """The flat params of all units."""
        return [flat_param for _, unit in self.units for flat_param in unit.flat_params]

    @property
    def slots(self) -> list[ParamSlot]:
        """The parameters of all units."""
        return [slot for flat_param in self.flat_params for slot in flat_param.slots]

    def own(self, skip: set[int]) -> list[tuple[str, nn.Module]]:
        """The modules that are in no unit and whose ``id`` is not in ``skip``, in the order of construction."""
        return list(_own(self.module, "", set(skip)))

    def place_units(self) -> None:
        """Give the units the names that they have here, by which messages name their parameters."""
        for fqn, unit in self.units:
            place(unit, fqn)


def _own(module: nn.Module, fqn: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in seen or unit_of(module) is not None:
        return
    seen.add(id(module))
    for name, child in module._modules.items():
        if child is not None:
            yield from _own(child, join(fqn, name), seen)
    yield fqn, module
