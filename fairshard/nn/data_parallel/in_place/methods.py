"""Methods of a module sharded in place: registered ones run gathered; errors in others explain how to gather."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn

from fairshard.engine.tree import unit_of, units_below
from fairshard.errors import FairshardError, ParameterShardedError
from fairshard.nn.data_parallel.late_methods import CURES, refusing
from fairshard.utils.dynamo import not_traced

_RUN_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


def check_runs_now(method: Callable[..., Any], name: str, owner: type) -> None:
    """Check that the body of ``method`` runs before the call returns, while parameters are gathered.

    Raises:
        TypeError: ``method`` is a generator or coroutine function.
    """
    if any(runs_later(method) for runs_later in _RUN_LATER):
        raise TypeError(
            f"A forward method must finish before it returns, but `{name}` of {owner.__name__} is a generator or "
            "coroutine function: its body would run after the parameters are freed. Register a method that it calls."
        )


class ForwardMethod:
    """Descriptor in the class of a sharded module that runs its method ``name`` like a forward."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: Any) -> Any:
        """The bound method of the instance or class; on the class itself, the original function."""
        if module is None:
            return getattr(owner._fairshard_class, self.name)
        method = module.__dict__.get(self.name)
        if method is None:
            method = getattr(super(owner, module), self.name)

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            return module._fairshard_run(method, args, kwargs)

        return call

    def __set__(self, module: Any, value: Any) -> None:
        """Set another method on the instance; it also runs like a forward."""
        module.__dict__[self.name] = value


def explaining_methods(original: type[nn.Module]) -> dict[str, Any]:
    """The public methods of ``original``, whose errors about mixed DTensors explain how to gather."""
    methods: dict[str, Any] = {}
    for base in original.__mro__[: original.__mro__.index(nn.Module)]:
        for name, value in vars(base).items():
            if not name.startswith("_"):
                methods.setdefault(name, value)
    return {
        name: _explaining(name, method)
        for name, method in methods.items()
        if isinstance(method, FunctionType) and not any(runs_later(method) for runs_later in _RUN_LATER)
    }


def _explaining(name: str, function: FunctionType) -> Callable[..., Any]:
    @not_traced  # if it starts a graph, the frame of `function` does: each function has compiled code of its own
    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = getattr(self._fairshard_class, name)  # as it is now: users may replace methods of their classes
        if name in CURES and (unit := unit_of(self)) is not None:
            return refusing(unit, self, name, functools.partial(function, self))(*args, **kwargs)
        try:
            return function(self, *args, **kwargs)
        except FairshardError:
            raise
        except RuntimeError as error:
            if "DTensor" in str(error):
                _explain(self, name, error)
            raise

    return call


def _explain(module: nn.Module, name: str, error: RuntimeError) -> None:
    sharded = [fqn for fqn, unit in units_below(module) if not unit.is_gathered]
    unit = unit_of(module)
    if unit is None or not sharded:
        return
    place = f"`{name}` of the sharded {type(module).__name__.removeprefix('FSDP')} `{unit.fqn or 'root'}`"
    if unit.is_gathered:
        whole = next((fqn for fqn, below in units_below(module) if below.is_gathered and below is not unit), None)
        mixed = f" To compute with shards, first call `reshard()` of `{whole}`, which is whole." if whole else ""
        raise ParameterShardedError(
            f"{place} must use parameters of inner units by calling those units, but seems to compute with "
            f"parameters of `{sharded[0]}`, which is not gathered. Shard the two as one unit, or move the computation "
            f"there.{mixed}"
        ) from error
    cure = (
        "Call the module itself"
        if name == "forward"
        else f'Gather them with `fairshard.nn.register_fsdp_forward_method(module, "{name}")`'
    )
    raise ParameterShardedError(f"{place} computes with parameters that are only shards now. {cure}.") from error
