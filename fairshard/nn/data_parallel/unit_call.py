"""One call of a unit: its parameters gathered before, freed after, and nothing left behind when it raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fairshard.nn.data_parallel.listing import hide_leaves, show_leaves

if TYPE_CHECKING:
    from fairshard.nn.data_parallel.unit import Unit


def call_in(unit: Unit, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``function(*args, **kwargs)`` as a forward of ``unit``, which has joined a root. **Collective.**"""
    args, kwargs, call = unit.pre_forward(args, kwargs)
    shown = show_leaves(unit.flat_params)
    try:
        outputs = function(*args, **kwargs)
    except BaseException:
        hide_leaves(shown)
        unit.abort_forward()
        raise
    hide_leaves(shown)
    return unit.post_forward(outputs, call)
