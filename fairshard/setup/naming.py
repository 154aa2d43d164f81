"""Names of units, and of their parameters, in the whole model."""

from __future__ import annotations

from fairshard.engine.unit import Unit
from fairshard.utils.names import join


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
