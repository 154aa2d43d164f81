"""Finding units in a module tree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import nn

from fairshard.utils.collectives import communicators
from fairshard.utils.names import join

if TYPE_CHECKING:
    from fairshard.engine.root import Root
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


def is_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is a wrapper around the module that was sharded, its child ``module``."""
    unit = unit_of(module)
    return unit is not None and unit.members is None


def units_below(module: nn.Module) -> list[tuple[str, Unit]]:
    """``(fqn, unit)`` of every unit in the tree, outermost first."""
    return named_units(walk(module))


def named_units(parts: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, Unit]]:
    """``(fqn, unit)`` of every unit in ``parts``, those of `walk`; a unit of several modules has their names joined."""
    found: dict[Unit, dict[int, str]] = {}
    for fqn, part in parts:
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


def every_root() -> list[Root]:
    """All models of this process."""
    engines = [engine for comm in list(communicators.values()) for engine in comm.engines.values()]
    return [root for engine in engines for root in list(engine.roots)]
