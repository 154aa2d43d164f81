"""Step shards with any torch optimizer: calls of its kernel over flat tensors."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fairshard.checks.optimizer_check import allow_held_gradients
from fairshard.errors import FairshardError
from fairshard.optim.local_parts import LocalParts
from fairshard.utils.before_step import about_to_step
from fairshard.utils.tensors import round_stochastically_

# Counts the roundings of the moments, and seeds the next one. Part of the state, so that a resumed run repeats it.
_ROUNDINGS = "num_roundings"


class Twin:
    """An optimizer of the user's class that steps some parameters of ``owner``, using the owner's state.

    ``template`` is an optimizer of that class; ``parts`` provides the local elements of DTensor parameters. Moments are
    stored in ``state_dtype`` by `step_one`, unless it is None.
    """

    def __init__(
        self, template: Optimizer, owner: Optimizer, parts: LocalParts, state_dtype: torch.dtype | None = None
    ) -> None:
        self._owner = weakref.proxy(owner)  # the owner holds this object
        self._parts = parts
        self._state_dtype = state_dtype
        self._optimizer = object.__new__(type(template))
        self._optimizer.__dict__.update(template.__dict__)
        # The profiler and the hooks around `step` belong to the owner's step: unwrap them.
        step = type(template).step
        self._step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
        allow_held_gradients(self._optimizer)  # a subclass may call its base's step, which has the hooks

    @torch.no_grad()
    def step(self, groups: list[dict[str, Any]]) -> None:
        """Step the parameters of ``groups`` with their hyperparameters and ``.grad``."""
        about_to_step()
        entered, state = self._parts.enter(groups, self._owner.state)
        is_sgd = type(self._optimizer) is torch.optim.SGD  # a subclass may count steps in its groups
        self._optimizer.param_groups = _by_momentum(entered, state) if is_sgd else entered
        self._optimizer.state = state
        try:
            self._step(self._optimizer)
        finally:
            self._parts.leave(groups, state, self._owner.state)
        for group, stepped in zip(groups, entered, strict=True):
            group.update({name: value for name, value in stepped.items() if name != "params"})

    @torch.no_grad()
    def step_one(self, shard: nn.Parameter, group: dict[str, Any], grad: Tensor) -> None:
        """Step ``shard`` with ``grad``, on its device, and the hyperparameters of ``group``."""
        own = {**group, "params": [shard]}
        kept, shard.grad = shard.grad, grad
        narrow = self._widen(shard) if self._state_dtype is not None else {}
        try:
            self.step([own])
        finally:
            shard.grad = kept
        if self._state_dtype is not None:
            self._narrow(shard, narrow, self._state_dtype)
        if any(value is not group.get(name) for name, value in own.items() if name != "params"):
            raise FairshardError(
                "An optimizer with counters in its param groups must step all shards together, but this steps one "
                "shard, which would advance them once per shard. Use neither overlap, state_dtype nor held gradients."
            )

    def _widen(self, shard: nn.Parameter) -> dict[str, Tensor]:
        """Convert moments to the shard's dtype for the kernel; returns the stored ones."""
        state = self._owner.state.get(shard, {})
        narrow = {name: value for name, value in state.items() if is_moment(value, shard)}
        for name, value in narrow.items():
            state[name] = self._parts.shown(shard, self._parts.own(shard, value).to(shard.dtype))
        return narrow

    def _narrow(self, shard: nn.Parameter, narrow: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """Store the moments in ``dtype`` with stochastic rounding; rounding to nearest would lose small changes."""
        parts, state = self._parts, self._owner.state[shard]
        state[_ROUNDINGS] = state.get(_ROUNDINGS, 0) + 1
        seed = hash((parts.seed_of(shard), state[_ROUNDINGS])) & 0x7FFFFFFFFFFFFFFF
        generator = torch.Generator().manual_seed(seed)
        for name, value in list(state.items()):
            if is_moment(value, shard):
                target, own = narrow.get(name), parts.own(shard, value)
                into = torch.empty_like(own, dtype=dtype) if target is None else parts.own(shard, target)
                state[name] = parts.shown(shard, round_stochastically_(own, into, generator))


def _by_momentum(groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """``groups``, each cut in two if only some of its parameters have a momentum buffer yet.

    Otherwise torch's fused SGD (to 2.13) raises a TypeError, when an expert gets its first gradient in a later step.
    """
    cut: list[dict[str, Any]] = []
    for group in groups:
        parts: dict[bool, list[nn.Parameter]] = {}
        for param in group["params"]:
            parts.setdefault(state.get(param, {}).get("momentum_buffer") is None, []).append(param)
        cut += [{**group, "params": params} for params in parts.values()]
    return cut


def is_moment(value: Any, param: Tensor) -> bool:
    """Whether ``value``, from the optimizer state of ``param``, has one number per element, unlike a count of steps."""
    is_alike = isinstance(value, Tensor) and isinstance(value, DTensor) == isinstance(param, DTensor)
    if not is_alike or value.shape != param.shape or not value.is_floating_point():
        return False
    return value.dim() > 0 or isinstance(value, DTensor)  # a plain one without dimensions may be a count
