"""Finding units in a module tree, and naming what is in it as if nothing were wrapped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from fairshard.nn.data_parallel.unit import Unit

UNIT_ATTRIBUTE = "_fairshard_unit"
_WRAPPED = "module"
COMPILED = "_orig_mod"  # torch.compile's, which unlike torch's checkpoint wrapper leaves it in state dicts
_WRAPPERS = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", COMPILED}


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that a door has made of ``module``, if any."""
    unit: Unit | None = module.__dict__.get(UNIT_ATTRIBUTE)
    return unit


def walk(module: nn.Module, prefix: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Every module below ``module`` once, itself first, with its fqn; wrappers share that of what they wrap."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            inside = prefix if name == _WRAPPED and unit_of(module) is not None else join(prefix, name)
            yield from walk(child, inside, seen)


def units_below(module: nn.Module) -> list[tuple[str, Unit]]:
    """``(fqn, unit)`` of every unit in the tree of ``module``, outermost first."""
    return [(fqn, unit) for fqn, part in walk(module) if (unit := unit_of(part)) is not None]


def modules_of(wrapper: nn.Module) -> list[nn.Module]:
    """The modules that belong to the unit of ``wrapper`` and to no unit inside it."""
    return [module for _, module in paths_of(wrapper)]


def paths_of(wrapper: nn.Module) -> list[tuple[str, nn.Module]]:
    """As `modules_of`, outermost first, each with its path below what is wrapped."""
    own: dict[int, tuple[str, nn.Module]] = {}
    waiting = [("", child) for child in wrapper._modules.values() if child is not None]
    while waiting:
        path, module = waiting.pop()
        if id(module) not in own and unit_of(module) is None:
            own[id(module)] = path, module
            waiting += [(join(path, name), child) for name, child in module._modules.items() if child is not None]
    return list(own.values())


def join(prefix: str, name: str) -> str:
    """``prefix.name``, or the one that is not empty."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def clean_tensor_name(name: str) -> str:
    """The name of a parameter or buffer without what wrappers added to it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
