"""Arguments of public functions that name models and sharded modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from fairshard.engine.tree import unit_of, units_below
from fairshard.engine.unit import Unit
from fairshard.settings.check import require


def check_module(model: Any) -> None:
    """Check that ``model`` is a module.

    Raises:
        TypeError: it is not.
    """
    require(
        isinstance(model, nn.Module),
        f"`model` must be an nn.Module, but is {type(model).__name__}. Pass the model first.",
        TypeError,
    )


def units_to(be_used: str, model: Any, cure: str) -> list[Unit]:
    """The units of ``model``, which must have some ``be_used`` ("to be observed"); otherwise the error has ``cure``.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``model`` contains no unit.
    """
    check_module(model)
    units = [unit for _, unit in units_below(model)]
    name = type(model).__name__
    require(units, f"`model` must contain sharded modules {be_used}, but {name} has none. {cure}")
    return units


def units_of(
    modules: Sequence[nn.Module], kind: str = "FullyShardedDataParallel", error: type[Exception] = TypeError
) -> tuple[Unit, ...]:
    """The units of ``modules``.

    Raises:
        Exception: an ``error``, if ``modules`` is not a list or contains something other than a ``kind``.
    """
    require(
        isinstance(modules, (list, tuple)),
        f"`modules` must be a list of {kind}, but is a {type(modules).__name__}.",
        error,
    )
    found = [unit_of(module) if isinstance(module, nn.Module) else None for module in modules]
    strangers = [type(module).__name__ for module, unit in zip(modules, found, strict=True) if unit is None]
    require(
        not strangers,
        f"`modules` must be a list of {kind}, but holds {''.join(strangers[:1])}. Pass modules that were sharded "
        "themselves: any other is gathered with the unit that contains it.",
        error,
    )
    return tuple(unit for unit in found if unit is not None)
