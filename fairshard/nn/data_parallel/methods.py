"""Methods of a user's module, called when it is sharded: registered ones run gathered; errors in others explain how to.

Methods that change whole parameters, such as ``tie_weights``, come before sharding: `CURES` says so if they fail.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from fairshard.checks.usage import assert_none_summoned
from fairshard.engine.training_state import TrainingState
from fairshard.engine.tree import is_wrapper, unit_of, units_below
from fairshard.engine.unit import Unit
from fairshard.errors import FairshardError, ParameterShardedError
from fairshard.settings.check import require
from fairshard.state.shown import is_shown, shown_on_first
from fairshard.utils.dynamo import not_traced
from fairshard.utils.nested import apply_to_all, plain_objects

CURES = {
    "resize_token_embeddings": "Resize the embeddings before sharding the model.",
    "tie_weights": "Tie the modules before sharding the model, in one unit.",
    "reset_parameters": (
        "Call it before sharding the model; or inside `FullyShardedDataParallel.summon_full_params(model)`; or pass "
        "`allow_reset_parameters=True` to the wrapper."
    ),
}
"""The cure for a call of each of these methods, by name."""


# ---- forward methods


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Run ``module.<method_name>(...)`` of the wrapped module with the unit gathered, like a forward.

    For methods that read parameters without calling ``module(...)``, such as ``generate`` of Hugging Face's models or
    ``encode``. Inputs are cast and outputs hooked for the backward as in a forward; hooks of ``nn.Module`` do not run.
    The call is **collective**. Inner units are gathered when they are called. If no backward follows, call the method
    under ``torch.no_grad()``; otherwise the parameters stay gathered until the next pass.

    Some methods first look for a parameter (``generate`` reads its device). While the method runs, as in a forward,
    ``self.parameters()`` yields the gathered parameters of the unit.

    >>> import torch
    >>> from fairshard.nn import FullyShardedDataParallel as FSDP, register_forward_method
    >>> class Encoder(torch.nn.Linear):
    ...     def encode(self, x):
    ...         return torch.tanh(self(x))
    >>> model = FSDP(Encoder(4, 4))
    >>> register_forward_method(model, "encode")
    >>> model.encode(torch.ones(2, 4)).sum().backward()

    Raises:
        AttributeError: the wrapped module has no such method.
        TypeError: ``module`` is not sharded, or the method is a generator or coroutine function.
        ValueError: the wrapper itself has a method of that name.

    Source: ``register_fsdp_forward_method`` of PyTorch's FSDP2.
    """
    require(
        unit_of(module) is not None,
        f"A forward method must be registered on the wrapper, but this is a {type(module).__name__}. Pass the "
        "FullyShardedDataParallel around it; a module around wrappers needs nothing.",
        TypeError,
    )
    _register(module, method_name, AttributeError)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Like `register_forward_method`, but does nothing if ``module`` is not sharded.

    >>> import torch
    >>> from fairshard.nn import fully_shard, register_fsdp_forward_method
    >>> class Encoder(torch.nn.Linear):
    ...     def encode(self, x):
    ...         return torch.nn.functional.linear(x, self.weight)
    >>> model = fully_shard(Encoder(4, 4))
    >>> register_fsdp_forward_method(model, "encode")
    >>> model.encode(torch.ones(2, 4)).sum().backward()

    Raises:
        ValueError: ``module`` has no such method, or `FSDPModule` has a method of that name.
        TypeError: the method is a generator or coroutine function.

    Source: PyTorch's function of the same name.
    """
    if unit_of(module) is not None:
        _register(module, method_name, ValueError)


def _register(module: nn.Module, name: str, missing: type[Exception]) -> None:
    """Run method ``name`` of ``module`` gathered; raises ``missing`` if there is none."""
    layers: list[Any] = []
    inside: Any = module
    while is_wrapper(inside):
        layers.append(inside)
        inside = inside.module
    original = getattr(inside, "_fairshard_class", type(inside))
    mro = type(inside).__mro__
    door = type(module) if layers else next(base for base in mro if "_fairshard_gather_in" in vars(base))
    require(
        not any(name in vars(base) for base in door.__mro__ if layers or not issubclass(nn.Module, base)),
        f"`{name}` must not be a method of {door.__name__} itself, but is. Rename that of {original.__name__}.",
    )
    method: Any = getattr(inside, name, None)
    require(
        callable(method),
        f"The sharded {original.__name__} must have a method `{name}` to register, but has none.",
        missing,
    )
    require(
        not _runs_later(method),
        f"A forward method must finish before it returns, but `{name}` of {original.__name__} is a generator or "
        "coroutine function: its body would run after the parameters are freed. Register a method that it calls.",
        TypeError,
    )
    for layer in layers:
        layer._fairshard_methods.add(name)
    if unit_of(inside) is not None:
        inside._fairshard_gather_in(name)


# ---- methods that change whole parameters


def refusing(unit: Unit, module: nn.Module, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` ``name`` of ``module``, sharded by ``unit``, one of `CURES`: raises the cure if it fails on shards."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if unit.state is not TrainingState.IDLE:
            return method(*args, **kwargs)
        cause: Exception | None = None
        inner = [below for _, below in units_below(module)]
        if name != "reset_parameters" or not any(map(_has_parts, (unit, *inner))):  # empty parts would not fail
            try:
                return method(*args, **kwargs)
            except Exception as error:
                cause = error
        is_known = cause is None or isinstance(cause, FairshardError)
        raise ParameterShardedError(
            f"`{name}` of the sharded {type(module).__name__.removeprefix('FSDP')} (unit `{unit.fqn or 'root'}`) must "
            f"change whole parameters, but only shards are kept of them. {CURES[name]}"
            f"{'' if is_known else f' It raised {type(cause).__name__}: {cause}'}"
        ) from cause

    return call


def _has_parts(unit: Unit) -> bool:
    """Whether matrices of ``unit`` are registered as this rank's 1-D parts of them."""
    slots = [slot for flat_param in unit.flat_params for slot in flat_param.slots]
    return any(slot.registered is not None and slot.registered.dim() < len(slot.shape) for slot in slots)


# ---- of `fully_shard`


def _runs_later(method: Any) -> bool:
    """Whether the body of ``method`` runs after the call has returned, when parameters are freed."""
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return any(is_kind(method) for is_kind in kinds)


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
        if isinstance(method, FunctionType) and not _runs_later(method)
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


# ---- of the wrapper


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
        raise _not_found(module, name, error) from error
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
            raise _not_found(module, name, error) from error
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


def _not_found(module: nn.Module, name: str, error: StopIteration) -> Exception:
    if next(module.parameters(), None) is not None:
        return error
    return ParameterShardedError(
        f"`{name}` of the wrapped {type(module).__name__} must find a parameter (for a device or a dtype), but all are "
        "in the flat parameter of its wrapper. If it is a method, gather them with "
        f'`fairshard.nn.register_forward_method(wrapper, "{name}")`; or wrap modules inside as their own units, or '
        "pass `use_orig_params=True`."
    )
