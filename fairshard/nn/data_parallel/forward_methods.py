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
    if not isinstance(module, (FullyShardedDataParallel, FSDPModule)):
        raise TypeError(
            f"A forward method must be registered on the wrapper, but this is a {type(module).__name__}. Pass the "
            "FullyShardedDataParallel around it; a module around wrappers needs nothing."
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
    if isinstance(module, (FullyShardedDataParallel, FSDPModule)):
        _register(module, method_name, ValueError)


def _register(module: FullyShardedDataParallel | FSDPModule, name: str, missing: type[Exception]) -> None:
    """Run method ``name`` of ``module`` gathered; raises ``missing`` if there is none."""
    layers: list[FullyShardedDataParallel] = []
    inside: nn.Module = module
    while isinstance(inside, FullyShardedDataParallel):
        layers.append(inside)
        inside = inside.module
    door = FullyShardedDataParallel if layers else FSDPModule
    original = inside._fairshard_class if isinstance(inside, FSDPModule) else type(inside)
    if any(name in vars(base) for base in door.__mro__ if layers or not issubclass(nn.Module, base)):
        raise ValueError(
            f"`{name}` must not be a method of {door.__name__} itself, but is. Rename that of {original.__name__}."
        )
    method = getattr(inside, name, None)
    if not callable(method):
        raise missing(f"The sharded {original.__name__} must have a method `{name}` to register, but has none.")
    check_runs_now(method, name, original)
    for layer in layers:
        layer._fairshard_methods.add(name)
    if isinstance(inside, FSDPModule):
        run_gathered(inside, name)
