"""Methods of a wrapped module, other than its forward, that run with the unit gathered."""

from __future__ import annotations

import inspect

from fairshard.nn.data_parallel.fully_sharded_data_parallel import FullyShardedDataParallel

_RUN_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


def register_forward_method(module: FullyShardedDataParallel, method_name: str) -> None:
    """Let ``module.<method_name>(...)``, of the wrapped module, run with the unit gathered, as a forward does.

    For methods that read parameters without going through ``module(...)``: ``generate`` of Hugging Face's models,
    ``encode``. Inputs are cast and outputs hooked for the backward as those of a forward; hooks of ``nn.Module`` do
    not run. The call is **collective**. Parameters of units inside are gathered when those are called. Call it under
    ``torch.no_grad()`` if no backward follows: else the parameters stay gathered for that until the next pass.

    Some methods look for a parameter first (``generate`` asks for the device). While such a method runs, the wrapped
    module lists whole parameters where it has been flattened, and shards elsewhere.

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
        TypeError: ``module`` is not a FullyShardedDataParallel; or the method is a generator or coroutine function.
        ValueError: the wrapper has a method of that name itself.

    Source: ``register_fsdp_forward_method`` of PyTorch's FSDP2.
    """
    if not isinstance(module, FullyShardedDataParallel):
        raise TypeError(
            f"A forward method is registered on the wrapper, but this is a {type(module).__name__}. Pass the "
            "FullyShardedDataParallel around it; a module around wrappers needs nothing."
        )
    if hasattr(FullyShardedDataParallel, method_name):
        raise ValueError(
            f"`{method_name}` is a method of FullyShardedDataParallel itself, which calls on the wrapper reach first. "
            "Give the method of the wrapped module another name."
        )
    layers, inside = [], module.module
    while isinstance(inside, FullyShardedDataParallel):
        layers.append(inside)
        inside = inside.module
    method = getattr(inside, method_name, None)
    if not callable(method):
        raise AttributeError(
            f"The wrapped {type(inside).__name__} must have a method `{method_name}` to register, but has none."
        )
    if any(runs_later(method) for runs_later in _RUN_LATER):
        raise TypeError(
            f"A forward method must be done when it returns, but `{method_name}` of {type(inside).__name__} is a "
            "generator or coroutine function: its body would find the parameters freed again. Register what it calls."
        )
    for layer in (module, *layers):
        layer.forward_methods.add(method_name)
