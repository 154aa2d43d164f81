"""Arguments of public functions that name models and sharded modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from fairshard.engine.tree import unit_of, units_below
from fairshard.engine.unit import Unit


def check_module(model: Any) -> None:
    """Check that ``model`` is a module.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be an nn.Module, but is {type(model).__name__}. Pass the model first.")


def units_to(be_used: str, model: Any, cure: str) -> list[Unit]:
    """The units of ``model``, which must have some ``be_used`` ("to be observed"); otherwise the error has ``cure``.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``model`` contains no unit.
    """
    check_module(model)
    units = [unit for _, unit in units_below(model)]
    if not units:
        raise ValueError(f"`model` must contain sharded modules {be_used}, but {type(model).__name__} has none. {cure}")
    return units


def units_of(
    modules: Sequence[nn.Module], kind: str = "FullyShardedDataParallel", error: type[Exception] = TypeError
) -> tuple[Unit, ...]:
    """The units of ``modules``.

    Raises:
        Exception: an ``error``, if ``modules`` is not a list or contains something other than a ``kind``.
    """
    if not isinstance(modules, (list, tuple)):
        raise error(f"`modules` must be a list of {kind}, but is a {type(modules).__name__}.")
    units = []
    for module in modules:
        unit = unit_of(module) if isinstance(module, nn.Module) else None
        if unit is None:
            raise error(
                f"`modules` must be a list of {kind}, but holds {type(module).__name__}. Pass modules that were "
                "sharded themselves: any other is gathered with the unit that contains it."
            )
        units.append(unit)
    return tuple(units)
