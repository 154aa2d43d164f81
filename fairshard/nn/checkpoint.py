"""Activation checkpointing: drop a module's activations after its forward, and recompute them in the backward."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint, noop_context_fn

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
    if not isinstance(module, nn.Module):
        raise TypeError(f"`module` must be an nn.Module, but is {type(module).__name__}.")
    if "forward" in module.__dict__:
        raise ValueError(
            f"`forward` must be a method to be checkpointed, but this {type(module).__name__} has it as an instance "
            "attribute. Apply checkpoint_wrapper before that is set."
        )
    base: Any = type(module)
    if issubclass(base, _Checkpointed):
        base = base.__mro__[2]
    module.__class__ = _checkpointed(base, bool(offload_to_cpu))  # type: ignore[assignment]
    return module


class _Switch(threading.local):
    """Whether checkpointing is off in this thread."""

    is_off = False


_switch = _Switch()


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
    before, _switch.is_off = _switch.is_off, is_off
    try:
        yield
    finally:
        _switch.is_off = before


class _Checkpointed:
    """Mixin that `checkpoint_wrapper` puts in front of a module's class."""

    _offloads_inputs = False

    @breaks_graph("a checkpoint of fairshard's `checkpoint_wrapper` cannot be in a graph; the module inside it can")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original forward, which the backward recomputes. If compiled code calls it, only that is compiled."""
        forward = super().forward  # type: ignore[misc]
        tracer = set_tracer(None)
        if tracer is None:
            return self._fairshard_checkpoint(forward, args, kwargs)
        try:
            return self._fairshard_checkpoint(functools.partial(_traced, tracer, forward), args, kwargs)
        finally:
            set_tracer(tracer)

    def _fairshard_checkpoint(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _switch.is_off or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        assert isinstance(self, nn.Module)
        inputs = _Inputs(args, kwargs, self._offloads_inputs)
        run = functools.partial(_call, forward, inputs)
        context_fn: Callable[[], Any] = noop_context_fn
        if any(isinstance(part, _NormBase) for part in self.modules()):
            context_fn = functools.partial(_recomputing, self)
        return checkpoint(run, *inputs.on_each_device(), use_reentrant=False, context_fn=context_fn)

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


def _call(forward: Callable[..., Any], inputs: _Inputs, *_: Tensor) -> Any:
    args, kwargs = inputs.take()
    if not _switch.is_off:
        return forward(*args, **kwargs)
    with _checkpointing(is_off=False):  # recomputed by a backward in the block: inner modules checkpoint as before
        return forward(*args, **kwargs)


def _recomputing(module: nn.Module) -> tuple[Any, Any]:
    return contextlib.nullcontext(), _StatisticsKept(module)


class _Inputs:
    """The arguments of one call: the originals for the forward, and those kept for the recomputation."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], offload: bool) -> None:
        self._given: Any = args, kwargs
        self._placeholders: dict[int, Tensor] = {}  # one per tensor, so that a repeated tensor stays one object
        self._kept: dict[int, _Kept] = {}  # by the id of the placeholder
        self._offload = offload
        self._skeleton = apply_to_tensors(self._keep, self._given)
        self._placeholders.clear()

    def _keep(self, tensor: Tensor) -> Tensor:
        placeholder = self._placeholders.get(id(tensor))
        if placeholder is None:
            placeholder = self._placeholders[id(tensor)] = torch.empty(0, device="cpu")
            self._kept[id(placeholder)] = _Kept(tensor, self._offload)
        return placeholder

    def on_each_device(self) -> list[Tensor]:
        """An empty tensor on every device that may compute, so that torch saves the random state of the device.

        These are the devices of the inputs, and the accelerator to which an inner wrapper may move them.
        """
        devices = dict.fromkeys([*(kept.device for kept in self._kept.values()), *accelerators_in_use()])
        return [torch.empty(0, device=device) for device in devices]

    def take(self) -> Any:
        """``args, kwargs``: the originals on the first call, the kept ones later."""
        given, self._given = self._given, None
        if given is not None:
            return given
        restored = {key: kept.restore() for key, kept in self._kept.items()}
        return apply_to_tensors(lambda placeholder: restored[id(placeholder)], self._skeleton)


class _Kept:
    """One input tensor, or its copy in host memory."""

    def __init__(self, tensor: Tensor, offload: bool) -> None:
        self.device = tensor.device
        self._requires_grad = tensor.requires_grad
        self._is_copy = offload and self.device.type != "cpu"
        self._tensor = tensor
        self._version = 0 if tensor.is_inference() else tensor._version
        if self._is_copy:
            pinned = is_asynchronous(self.device)
            self._tensor = torch.empty_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)
            self._tensor.copy_(tensor.detach(), non_blocking=pinned)

    def restore(self) -> Tensor:
        """The tensor for a recomputation; a copy from host memory is a leaf, whose gradient is not used."""
        if self._is_copy:
            return self._tensor.to(self.device, non_blocking=True).requires_grad_(self._requires_grad)
        if not self._tensor.is_inference() and self._tensor._version != self._version:
            raise RuntimeError(
                f"The inputs of a checkpointed module must not change between its forward and its backward, but one of "
                f"shape {tuple(self._tensor.shape)} was modified in place. Clone it first."
            )
        return self._tensor


class _StatisticsKept:
    """Context in which normalisation layers in training mode update copies of their running statistics."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._replaced: list[list[tuple[nn.Module, str, Tensor]]] = []

    def __enter__(self) -> None:
        replaced: list[tuple[nn.Module, str, Tensor]] = [
            (part, name, buffer)
            for part in self._module.modules()
            if isinstance(part, _NormBase) and part.training
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]
        for part, name, buffer in replaced:
            part._buffers[name] = buffer.clone()
        self._replaced.append(replaced)

    def __exit__(self, *unused: object) -> None:
        for part, name, buffer in self._replaced.pop():
            part._buffers[name] = buffer
