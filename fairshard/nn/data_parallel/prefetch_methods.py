"""Naming what is gathered ahead, for users who know better than the last pass."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fairshard.nn.data_parallel.tree import unit_of
from fairshard.nn.data_parallel.unit import Unit
from fairshard.nn.data_parallel.unit_attributes import UnitAttributes


class PrefetchMethods(UnitAttributes):
    """Of a wrapper: the methods that name which others are gathered ahead."""

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather ``modules``, wrappers of the same model, when this one's forward starts; an empty list undoes it.

        They take the place of the one that followed in the last pass. Ranks must name the same ones.

        Raises:
            TypeError: ``modules`` is not a list of wrappers.
        """
        self._unit.prefetch.forward = _units_of(modules)
        self._settle()

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather ``modules``, wrappers of the same model, when the backward comes to this one; an empty list undoes it.

        They take the place of the one that the backward should come to next. With ``BACKWARD_POST`` they are gathered
        once this one has its gradients, else before it computes them. Ranks must name the same ones.

        Raises:
            TypeError: ``modules`` is not a list of wrappers.
        """
        self._unit.prefetch.backward = _units_of(modules)
        self._settle()

    def _settle(self) -> None:
        root = self._unit.root
        if root is not None:
            self._unit.prefetch.settle(root.units)


def _units_of(modules: Sequence[nn.Module]) -> tuple[Unit, ...]:
    if not isinstance(modules, (list, tuple)):
        raise TypeError(f"`modules` must be a list of FullyShardedDataParallel, but is a {type(modules).__name__}.")
    units = []
    for module in modules:
        unit = unit_of(module) if isinstance(module, nn.Module) else None
        if unit is None:
            raise TypeError(
                f"`modules` must be a list of FullyShardedDataParallel, but holds {type(module).__name__}. Pass the "
                "wrappers, not the modules in them: what is not wrapped is gathered with the unit around it."
            )
        units.append(unit)
    return tuple(units)
