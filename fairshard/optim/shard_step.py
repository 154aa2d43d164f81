"""Step shards with any torch optimizer: calls of its kernel over flat tensors.

DTensor parameters are stepped through this rank's elements as plain 1-D tensors (`LocalParts`). torch's kernels then
run on plain tensors, without DTensor's overhead on the host; this includes fused kernels, which DTensors do not
support. Optimizer state is kept, and shown, as DTensors.
"""

from __future__ import annotations

import weakref
import zlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fairshard.checks.optimizer_check import allow_held_gradients
from fairshard.errors import FairshardError
from fairshard.utils.before_step import about_to_step
from fairshard.utils.tensors import round_stochastically_
from fairshard.views.orig_param import OrigParam, Stepped

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


class LocalParts:
    """This rank's elements of the parameters ``stepped``; plain parameters are used unchanged."""

    def __init__(self, stepped: Mapping[nn.Parameter, Stepped]) -> None:
        self._stepped = stepped
        self._plain: dict[nn.Parameter, nn.Parameter] = {}

    def origin_of(self, param: nn.Parameter) -> OrigParam | None:
        """The `OrigParam` of ``param`` if it is a DTensor of a unit; otherwise None."""
        stepped = self._stepped.get(param) if isinstance(param, DTensor) else None
        return stepped if isinstance(stepped, OrigParam) else None

    def own(self, param: nn.Parameter, value: Tensor) -> Tensor:
        """This rank's elements of ``value``, which has the shape of ``param``; ``[n]`` if ``param`` is a DTensor."""
        origin = self.origin_of(param)
        return value if origin is None else origin.own_of(value)

    def shown(self, param: nn.Parameter, own: Tensor) -> Tensor:
        """The value in optimizer state for this rank's elements ``own``: a DTensor if ``param`` is one."""
        origin = self.origin_of(param)
        return own if origin is None else origin.shown(own)

    def seed_of(self, param: nn.Parameter) -> int:
        """Random seed of ``param``: different for each rank's part; equal on all ranks if the parameter is whole."""
        stepped = self._stepped.get(param)
        is_whole = isinstance(param, DTensor) and not any(placement.is_shard() for placement in param.placements)
        name = "" if stepped is None else f"{stepped.name} of rank {0 if is_whole else stepped.line.rank}"
        return zlib.crc32(name.encode())

    def enter(self, groups: list[dict[str, Any]], state: Any) -> tuple[list[dict[str, Any]], Any]:
        """``groups`` and ``state`` with plain tensors in place of DTensors; unchanged without DTensors."""
        params = _params_of(groups)
        if not any(self.origin_of(param) for param in params):
            return groups, state
        entered = [{**group, "params": [self._enter(param) for param in group["params"]]} for group in groups]
        plain_state: dict[Any, Any] = defaultdict(dict)
        for param in params:
            plain, kept = self._plain.get(param), state.get(param)
            if kept is not None and plain is not None:
                kept = {name: self.own(param, v) if isinstance(v, DTensor) else v for name, v in kept.items()}
            if kept is not None:
                plain_state[param if plain is None else plain] = kept
        return entered, plain_state

    def leave(self, groups: list[dict[str, Any]], plain_state: Any, state: Any) -> None:
        """Write the ``plain_state`` that the step left back into ``state``."""
        if plain_state is state:
            return
        for param in _params_of(groups):
            plain = self._plain.get(param)
            made = plain_state.get(param if plain is None else plain)
            if plain is not None:
                plain.grad = None
                increment_version(param)
                before = state.get(param, {})
                for name, value in (made or {}).items():
                    if isinstance(value, Tensor) and value.shape == plain.shape:
                        made[name] = self._kept(param, before.get(name), value)
            if made is not None:
                state[param] = made

    def _enter(self, param: nn.Parameter) -> nn.Parameter:
        origin = self.origin_of(param)
        if origin is None:
            return param
        own = origin.own_of(param)
        plain = self._plain.get(param)
        if plain is None or plain.data_ptr() != own.data_ptr() or plain.dtype != own.dtype:
            plain = self._plain[param] = nn.Parameter(own, requires_grad=param.requires_grad)
        plain.grad = None if param.grad is None else origin.own_of(param.grad)
        return plain

    def _kept(self, param: nn.Parameter, before: Any, own: Tensor) -> Tensor:
        """A DTensor over ``own``: ``before`` if it already shows that memory."""
        if isinstance(before, DTensor) and self.own(param, before).data_ptr() == own.data_ptr() and own.numel():
            return before
        return self.shown(param, own)


def _params_of(groups: list[dict[str, Any]]) -> list[nn.Parameter]:
    return [param for group in groups for param in group["params"]]
