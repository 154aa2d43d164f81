"""Finding units in a module tree, and naming what is in it as if nothing were wrapped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from fairshard.nn.data_parallel.unit import Unit

UNIT_ATTRIBUTE = "_fairshard_unit"
_WRAPPED = "module"


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
    own: list[nn.Module] = []
    waiting = [child for child in wrapper._modules.values() if child is not None]
    seen: set[int] = set()
    while waiting:
        module = waiting.pop()
        if id(module) in seen or unit_of(module) is not None:
            continue
        seen.add(id(module))
        own.append(module)
        waiting += [child for child in module._modules.values() if child is not None]
    return own


def join(prefix: str, name: str) -> str:
    """``prefix.name``, or the one that is not empty."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def clean_tensor_name(name: str) -> str:
    """The name of a parameter or buffer without what wrappers added to it."""
    for part in ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"):
        name = name.replace(f"{part}.", "")
    return name
