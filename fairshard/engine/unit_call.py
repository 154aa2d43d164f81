"""One call of a unit: its parameters gathered before, freed after, and nothing left behind when it raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairshard.engine.unit import Unit


def call_in(unit: Unit, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``function(*args, **kwargs)`` as a forward of ``unit``, which has joined a root. **Collective.**"""
    args, kwargs, call = unit.pre_forward(args, kwargs)
    try:
        outputs = function(*args, **kwargs)
    except BaseException:
        unit.abort_forward()
        raise
    return unit.post_forward(outputs, call)
