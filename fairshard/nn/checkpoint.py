"""Activation checkpointing: drop a module's activations after its forward, and recompute them in the backward."""

from __future__ import annotations

import contextlib
import copyreg
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from fairshard.settings.check import require
from fairshard.utils.device import accelerators_in_use
from fairshard.utils.dynamo import set_tracer
from fairshard.utils.graph_breaks import breaks_graph
from fairshard.utils.nested import apply_to_tensors
from fairshard.utils.streams import is_asynchronous

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def checkpoint_wrapper(module: ModuleT, offload_to_cpu: bool = False) -> ModuleT:
    """Keep only the inputs of ``module`` for the backward, which runs its forward again; returns ``module``.

    The module changes in place: its class becomes a subclass of itself, so that names, hooks, ``isinstance``, state
    dicts, deepcopy and pickle work as before. It may be a unit, and contain units and other checkpointed modules.
    Statistics of BatchNorm and InstanceNorm are updated once; both runs write all other buffers, and draw the same
    random numbers. With ``offload_to_cpu`` the inputs, including tensors in nested arguments, are kept in host memory
    until the backward. With grad disabled, and inside `disable_checkpointing`, the forward runs without checkpointing.

    >>> import torch
    >>> from fairshard.nn import checkpoint_wrapper
    >>> block = checkpoint_wrapper(torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)))
    >>> block(torch.ones(2, 4)).sum().backward()
    >>> list(block.state_dict())
    ['0.weight', '0.bias', '2.weight', '2.bias']

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: its ``forward`` is an instance attribute, which a class cannot override.

    Source: fairscale's function of the same name, over non-reentrant ``torch.utils.checkpoint``.
    """
    require(isinstance(module, nn.Module), f"`module` must be an nn.Module, but is {type(module).__name__}.", TypeError)
    require(
        "forward" not in module.__dict__,
        f"`forward` must be a method to be checkpointed, but this {type(module).__name__} has it as an instance "
        "attribute. Apply checkpoint_wrapper before that is set.",
    )
    base: Any = type(module)
    if issubclass(base, _Checkpointed):
        base = base.__mro__[2]
    module.__class__ = _checkpointed(base, bool(offload_to_cpu))  # type: ignore[assignment]
    return module


_is_off: ContextVar[bool] = ContextVar("fairshard_checkpointing_is_off", default=False)  # in this thread


@contextlib.contextmanager
def disable_checkpointing() -> Iterator[None]:
    """Run modules of `checkpoint_wrapper` without checkpointing inside the ``with`` block, in this thread.

    A forward inside the block keeps all its activations. A backward recomputes what was checkpointed outside of the
    block, wherever the backward runs.

    >>> import torch
    >>> from fairshard.nn import checkpoint_wrapper, disable_checkpointing
    >>> block = checkpoint_wrapper(torch.nn.Linear(4, 4))
    >>> with disable_checkpointing():
    ...     loss = block(torch.ones(2, 4)).sum()
    >>> loss.backward()

    Source: fairscale's context of the same name.
    """
    with _checkpointing(is_off=True):
        yield


@contextlib.contextmanager
def _checkpointing(is_off: bool) -> Iterator[None]:
    token = _is_off.set(is_off)
    try:
        yield
    finally:
        _is_off.reset(token)


class _Checkpointed:
    """Mixin that `checkpoint_wrapper` puts in front of a module's class."""

    _offloads_inputs = False

    @breaks_graph("a checkpoint of fairshard's `checkpoint_wrapper` cannot be in a graph; the module inside it can")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original forward, which the backward recomputes. If compiled code calls it, only that is compiled."""
        tracer = set_tracer(None)
        forward = functools.partial(_traced, tracer, super().forward)  # type: ignore[misc]
        try:
            if _is_off.get() or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            run, inputs = _recomputable(self, forward, args, kwargs)
            # torch saves the random state of devices on which inputs are: an inner wrapper may move them to others.
            inputs += [torch.empty(0, device=device) for device in accelerators_in_use()]
            with saved_tensors_hooks(_to_host, _from_host) if self._offloads_inputs else contextlib.nullcontext():
                return checkpoint(run, *inputs, use_reentrant=False)
        finally:
            set_tracer(tracer)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        if reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            return _new, (type(self).__mro__[2], self._offloads_inputs), *reduced[2:]
        return reduced


@functools.cache
def _checkpointed(base: Any, offloads_inputs: bool) -> type[nn.Module]:
    namespace = {"_offloads_inputs": offloads_inputs, "__module__": base.__module__, "__doc__": base.__doc__}
    return type(f"Checkpointed{base.__name__}", (_Checkpointed, base), namespace)


def _new(base: Any, offloads_inputs: bool) -> nn.Module:
    made: type[nn.Module] = _checkpointed(base, offloads_inputs)
    return made.__new__(made)


def _traced(tracer: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``forward`` compiled by ``tracer``, in the backward as well: both runs must save the same tensors."""
    before = set_tracer(tracer)
    try:
        return forward(*args, **kwargs)
    finally:
        set_tracer(before)


def _recomputable(
    module: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], list[Tensor]]:
    """A function of tensors that calls ``forward(*args, **kwargs)``, and the tensors, each once.

    Later calls recompute: tensors that they are given take the places of the first ones, in containers of the same
    types, and buffers of norms stay as they are.
    """
    places: dict[int, tuple[Tensor, Tensor]] = {}  # by id, so that a repeated tensor stays one object
    empty = functools.partial(torch.empty, 0, device="cpu")
    skeleton = apply_to_tensors(lambda tensor: places.setdefault(id(tensor), (tensor, empty()))[1], (args, kwargs))
    order, first = [id(place) for _, place in places.values()], [(args, kwargs)]

    def run(*tensors: Tensor) -> Any:
        if first:
            given, named = first.pop()
            return forward(*given, **named)
        found = dict(zip(order, tensors, strict=False))
        given, named = apply_to_tensors(lambda place: found[id(place)], skeleton)
        with _checkpointing(is_off=False), _statistics_kept(module):  # a backward may be in `disable_checkpointing`
            return forward(*given, **named)

    return run, [tensor for tensor, _ in places.values()]


@contextlib.contextmanager
def _statistics_kept(module: nn.Module) -> Iterator[None]:
    """Inside, normalisation layers in training mode update copies of their running statistics."""
    norms = [part._buffers for part in module.modules() if isinstance(part, _NormBase) and part.training]
    kept = [dict(buffers) for buffers in norms]
    for buffers in norms:
        buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()})
    try:
        yield
    finally:
        for buffers, before in zip(norms, kept, strict=True):
            buffers.update(before)


def _to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
    """The device of ``tensor``, and a copy in host memory; torch's `save_on_cpu` would not copy one that is there."""
    pinned = is_asynchronous(tensor.device)
    copied = torch.empty_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)
    return tensor.device, copied.copy_(tensor.detach(), non_blocking=pinned)


def _from_host(kept: tuple[torch.device, Tensor]) -> Tensor:
    device, copied = kept
    return copied.to(device, non_blocking=True)
