"""One call of a unit: its leaves are the registered parameters while it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fairshard.engine.root import Engine
from fairshard.engine.unit import Unit
from fairshard.utils.async_tensors import waited
from fairshard.utils.containers import cast_inputs_to_fp16


def call_in(unit: Unit, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``function(*args, **kwargs)`` as a forward of ``unit``, which has joined a root. **Collective.**"""
    engine: Engine = unit.root.engine
    hooks = engine.enter(unit, args, kwargs)
    try:
        unit.open()
        if unit.input_dtype is not None:
            args, kwargs = cast_inputs_to_fp16(*args, dtype=unit.input_dtype, **kwargs)
        args, kwargs = waited(args, kwargs)
        outputs = function(*args, **kwargs)
    except BaseException:
        engine.abort(unit)
        raise
    return engine.leave(unit, outputs, hooks)
