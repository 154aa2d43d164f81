"""Methods of a wrapped module called through its wrapper: run with whole parameters, or with helpful errors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fairshard.checks.usage import assert_none_summoned
from fairshard.engine.training_state import TrainingState
from fairshard.engine.unit import Unit
from fairshard.errors import FairshardError, ParameterShardedError
from fairshard.nn.data_parallel.late_methods import CURES, refusing
from fairshard.state.shown import is_shown, shown_on_first
from fairshard.utils.nested import apply_to_all, plain_objects


def gathering(unit: Unit, method: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """``method``, called through ``run(function, args, kwargs)`` like a forward of ``unit``."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if unit.state is TrainingState.FORWARD:  # an inner call: the outer one gathers and frees
            return method(*args, **kwargs)
        if is_shown(unit) and unit not in shown_on_first:
            return _without_graph(unit, method(*args, **kwargs))  # `generate` itself disables gradients
        return run(method, args, kwargs)

    return call


def _without_graph(unit: Unit, outputs: Any) -> Any:
    """``outputs`` of a method of the shown ``unit``; raises if a backward could follow, which would change nothing."""

    def check(output: Tensor) -> Tensor:
        if output.requires_grad:
            assert_none_summoned([unit], "forward")
        return output

    objects = plain_objects(outputs)
    if objects is None and torch.is_grad_enabled():  # tensors may be anywhere in them
        assert_none_summoned([unit], "forward")
    return apply_to_all(check, outputs, objects)


def explaining(unit: Unit, module: nn.Module, name: str) -> Any:
    """Attribute ``name`` of ``module``, which ``unit`` wraps, with errors that explain missing parameters.

    If reading or calling it fails because ``module`` has no parameters, or has shards in their place, the error says
    how to gather them. Methods that save a given state dict find a shard, from which they read the dtype.
    """
    try:
        found = getattr(module, name)
    except StopIteration as error:
        raise _explained(module, name, error) from error
    if not inspect.ismethod(found) or found.__self__ is not module:
        return found
    if name in CURES:
        return refusing(unit, module, name, found)
    has_shards = any(slot.registered is not None for flat_param in unit.flat_params for slot in flat_param.slots)
    if not has_shards and next(module.parameters(), None) is not None:
        return found

    @functools.wraps(found)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with nullcontext() if has_shards or name not in _SAVING else _seen(unit, module):
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
                f"dimension: {error}. If it computes with them, gather them with "
                f'`fairshard.nn.register_forward_method(wrapper, "{name}")`.'
            ) from error

    return call


@contextmanager
def _seen(unit: Unit, module: nn.Module) -> Iterator[None]:
    """Inside, ``module.parameters()`` yields a shard of ``unit``; a state dict of ``module`` still raises."""
    key = "flat_param"
    module._parameters[key] = unit.flat_params[0].shard
    try:
        yield
    finally:
        del module._parameters[key]


_SAVING = ("save_pretrained", "push_to_hub")
PLACEMENT = ("device", "dtype")
"""Properties of Hugging Face's models, which look at a parameter."""


def placement_of(unit: Unit, name: str) -> Any:
    """The device on which ``unit`` computes, or the dtype of its parameters, whose shards its wrapper holds."""
    if name == "device":
        return unit.origin.device
    return unit.flat_params[0].shard.dtype


def _explained(module: nn.Module, name: str, error: StopIteration) -> Exception:
    if next(module.parameters(), None) is not None:
        return error
    return ParameterShardedError(
        f"`{name}` of the wrapped {type(module).__name__} must find a parameter (for a device or a dtype), but all are "
        "in the flat parameter of its wrapper. If it is a method, gather them with "
        f'`fairshard.nn.register_forward_method(wrapper, "{name}")`; or wrap modules inside as their own units, or '
        "pass `use_orig_params=True`."
    )
