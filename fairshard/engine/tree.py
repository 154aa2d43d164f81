"""Finding units in a module tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from fairshard.utils.names import join

if TYPE_CHECKING:
    from fairshard.engine.unit import Unit

UNIT_ATTRIBUTE = "_fairshard_unit"
_WRAPPED = "module"


def unit_of(module: nn.Module) -> Unit | None:
    """The unit attached to ``module``, if any."""
    unit: Unit | None = module.__dict__.get(UNIT_ATTRIBUTE)
    return unit


def walk(module: nn.Module, prefix: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """``(fqn, module)`` of each module in the tree once, outermost first; a wrapper and its child share one fqn."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            inside = prefix if name == _WRAPPED and is_wrapper(module) else join(prefix, name)
            yield from walk(child, inside, seen)


def attribute_paths(module: nn.Module, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Like `walk`, but with the path of attributes to each module, which has ``module`` in it for each wrapper."""
    seen = set() if seen is None else seen
    if id(module) not in seen:
        seen.add(id(module))
        yield path, module
        for name, child in module._modules.items():
            if child is not None:
                yield from attribute_paths(child, join(path, name), seen)


def is_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is a wrapper around the module that was sharded, its child ``module``."""
    unit = unit_of(module)
    return unit is not None and unit.members is None


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


def check_module(model: Any) -> None:
    """Check that ``model`` is a module.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be an nn.Module, but is {type(model).__name__}. Pass the model first.")


def units_below(module: nn.Module) -> list[tuple[str, Unit]]:
    """``(fqn, unit)`` of every unit in the tree, outermost first; a unit of several modules has their names joined."""
    found: dict[Unit, dict[int, str]] = {}
    for fqn, part in walk(module):
        unit = unit_of(part)
        if unit is not None:
            found.setdefault(unit, {})[id(part)] = fqn
    return [
        (", ".join(names.values() if unit.members is None else unit.members.in_order(names)), unit)
        for unit, names in found.items()
    ]


def modules_of(holder: nn.Module) -> list[nn.Module]:
    """The modules that belong to the unit of ``holder``, and to no unit inside it."""
    return [module for _, module in paths_of(holder)]


def paths_of(holder: nn.Module) -> list[tuple[str, nn.Module]]:
    """Like `modules_of`, outermost first, each with its path from the module that was sharded."""
    if is_wrapper(holder):
        own_modules = [(name, child) for name, child in holder._modules.items() if child is not None]
        waiting = [("" if name == _WRAPPED else name, child) for name, child in own_modules]
    else:
        waiting = [("", holder)]
    own: dict[int, tuple[str, nn.Module]] = {}
    while waiting:
        path, module = waiting.pop()
        if id(module) not in own and (module is holder or unit_of(module) is None):
            own[id(module)] = path, module
            waiting += [(join(path, name), child) for name, child in module._modules.items() if child is not None]
    return list(own.values())


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
