"""Methods of a sharded module, other than its forward, that run with the unit gathered."""

from __future__ import annotations

from torch import nn

from fairshard.nn.data_parallel.fully_sharded_data_parallel import FullyShardedDataParallel
from fairshard.nn.data_parallel.in_place.module import FSDPModule, run_gathered
from fairshard.nn.data_parallel.methods import check_runs_now


def register_forward_method(module: FullyShardedDataParallel | FSDPModule, method_name: str) -> None:
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
    if isinstance(module, FSDPModule):
        if not callable(getattr(module, method_name, None)):
            raise AttributeError(_missing(module._fairshard_class, method_name))
        register_fsdp_forward_method(module, method_name)
        return
    if not isinstance(module, FullyShardedDataParallel):
        raise TypeError(
            f"A forward method must be registered on the wrapper, but this is a {type(module).__name__}. Pass the "
            "FullyShardedDataParallel around it; a module around wrappers needs nothing."
        )
    if hasattr(FullyShardedDataParallel, method_name):
        raise ValueError(
            f"`{method_name}` must not be a method of FullyShardedDataParallel itself, but is. Rename the method of "
            "the wrapped module."
        )
    layers, inside = [], module.module
    while isinstance(inside, FullyShardedDataParallel):
        layers.append(inside)
        inside = inside.module
    method = getattr(inside, method_name, None)
    if not callable(method):
        raise AttributeError(_missing(type(inside), method_name))
    check_runs_now(method, method_name, type(inside))
    for layer in (module, *layers):
        layer._fairshard_methods.add(method_name)


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
    if isinstance(module, FullyShardedDataParallel):
        if not callable(getattr(module.module, method_name, None)):
            raise ValueError(_missing(type(module.module), method_name))
        register_forward_method(module, method_name)
    if not isinstance(module, FSDPModule):
        return
    original = module._fairshard_class
    if any(method_name in vars(base) for base in FSDPModule.__mro__ if not issubclass(nn.Module, base)):
        raise ValueError(
            f"`{method_name}` must not be a method of FSDPModule itself, but is. Rename the method of "
            f"{original.__name__}."
        )
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(_missing(original, method_name))
    check_runs_now(method, method_name, original)
    run_gathered(module, method_name)


def _missing(owner: type, method_name: str) -> str:
    return f"The sharded {owner.__name__} must have a method `{method_name}` to register, but has none."
