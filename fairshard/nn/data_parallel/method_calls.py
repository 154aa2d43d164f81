"""Methods of a wrapped module that are called through its wrapper: with what they look for, or told what they lack."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from fairshard.errors import FairshardError, ParameterShardedError
from fairshard.nn.data_parallel.training_state import TrainingState
from fairshard.nn.data_parallel.unit import Unit


def gathering(unit: Unit, method: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` as ``run(function, args, kwargs)`` calls a forward of ``unit``."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if unit.state is TrainingState.FORWARD:  # called from within: gathered, and freed by the outer call
            return method(*args, **kwargs)
        return run(method, args, kwargs)

    return call


def naming_cure(unit: Unit, module: nn.Module, name: str) -> Any:
    """Attribute ``name`` of ``module``, which ``unit`` wraps.

    Where it, or the method that it is, takes the first of no parameters, or fails with shards in their place, the
    error says how to have some.
    """
    try:
        found = getattr(module, name)
    except StopIteration as error:
        raise _explained(module, name, error) from error
    if not inspect.ismethod(found) or found.__self__ is not module:
        return found
    has_shards = any(slot.registered is not None for flat_param in unit.flat_params for slot in flat_param.slots)
    if not has_shards and next(module.parameters(), None) is not None:
        return found

    @functools.wraps(found)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return found(*args, **kwargs)
        except StopIteration as error:
            raise _explained(module, name, error) from error
        except FairshardError:
            raise
        except RuntimeError as error:
            if unit.is_gathered or not has_shards:
                raise
            raise ParameterShardedError(
                f"`{name}` of the wrapped {type(module).__name__} raised while its parameters are shards of one "
                f"dimension: {error}. If it computes with them, let it gather them, with "
                f'`fairshard.nn.register_forward_method(wrapper, "{name}")`.'
            ) from error

    return call


def _explained(module: nn.Module, name: str, error: StopIteration) -> Exception:
    if next(module.parameters(), None) is not None:
        return error
    return ParameterShardedError(
        f"`{name}` of the wrapped {type(module).__name__} must find a parameter (for a device or a dtype), but all are "
        "in the flat parameter of its wrapper. If it is a method, let it gather them, with "
        f'`fairshard.nn.register_forward_method(wrapper, "{name}")`; or wrap modules inside as units of their own, or '
        "pass `use_orig_params=True`."
    )
