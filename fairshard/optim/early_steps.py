"""Steps taken while the backward still runs: shard by shard, checked at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fairshard.errors import FairshardError
from fairshard.optim.cpu_worker import CPUWorker
from fairshard.params.flat_param import FlatParam
from fairshard.utils.streams import Event, now
from fairshard.views.orig_param import OrigParam, Stepped

StepOne = Callable[[nn.Parameter, dict[str, Any], Tensor], None]
"""Steps a shard with the hyperparameters of its group and a gradient."""


class EarlySteps:
    """The shards that one backward has stepped, and the assumptions of those steps."""

    def __init__(self, groups: list[dict[str, Any]], step_one: StepOne, worker: CPUWorker) -> None:
        self._groups = groups
        self._step_one = step_one
        self._worker = worker
        self._settings = [_settings_of(group) for group in groups]
        self._group_of = {param: group for group in groups for param in group["params"]}
        self._taken: dict[nn.Parameter, _Taken | None] = {}

    def take(self, flat_param: FlatParam) -> None:
        """Step one shard, whose gradient is complete."""
        for stepped in flat_param.stepped:
            self._take(stepped)

    def _take(self, flat_param: Stepped) -> None:
        shard = flat_param.shard
        group = self._group_of.get(shard)
        # A unit of one rank computes on the shard itself, which the backward still needs.
        if group is None or shard.device.type != "cpu" or flat_param.computes_on_shard:
            return
        if shard in self._taken:
            raise FairshardError(
                f"The gradient of `{flat_param.name}` arrived a second time, after its shard had been stepped. Only "
                "the last backward of a step may run inside last_backward()."
            )
        self._taken[shard] = None
        ready = now(flat_param.compute_device)
        self._worker.submit(f"`{flat_param.name}`", lambda: self._step(flat_param, group, ready))

    def _step(self, flat_param: Stepped, group: dict[str, Any], ready: Event) -> None:
        # A held gradient is read on a different stream than the one that produced it.
        flat_param.grad.transfers.wait(ready, counts=False)
        flat_param.grad.land(counts=False)
        grad = flat_param.grad.value
        if grad is None:  # unused, or frozen, beside others of its unit
            return
        self._taken[flat_param.shard] = _Taken.of(flat_param, grad)
        self._step_one(flat_param.shard, group, grad.to(flat_param.shard.device))

    def complete(self, flat_params: Iterable[FlatParam]) -> None:
        """After the backward, when all gradients have landed: step the remaining shards, and wait for the steps."""
        for flat_param in flat_params:
            is_taken = any(stepped.shard in self._taken for stepped in flat_param.stepped)
            if not is_taken and flat_param.grad.value is not None:
                self.take(flat_param)
        self._worker.wait_idle()

    def stepped(self) -> set[nn.Parameter]:
        """Shards that have been stepped."""
        return set(self._taken)

    def abandon(self) -> str:
        """After a failure, wait for the worker; returns a sentence about the shards that were stepped, or ""."""
        self._worker.clear()
        if not self._taken:
            return ""
        return f"{len(self._taken)} of {len(self._group_of)} shards had been stepped when the backward raised."

    def check_unchanged(self, grad_of: Callable[[nn.Parameter], Tensor | None]) -> None:
        """Raise if hyperparameters or gradients have changed since the steps; the error names the first one."""
        for group, before in zip(self._groups, self._settings, strict=True):
            for name, value in _settings_of(group).items():
                if name not in before or not _equal(before[name], value):
                    raise FairshardError(
                        f"Hyperparameter `{name}` must not change between last_backward() and step(), but went from "
                        f"{before.get(name)} to {value}. Change it after the step."
                    )
        for shard, taken in self._taken.items():
            if taken is not None and (grad_of(shard) is not taken.grad or taken.has_changed):
                raise FairshardError(
                    f"The gradient of `{taken.flat_param.name}` must not change between last_backward() and step(), "
                    "but did. Run the backward outside of last_backward() to edit gradients."
                )


@dataclass(frozen=True)
class _Taken:
    """A gradient at the time of its step.

    ``largest`` is the index and value ``[1]`` of a DTensor's largest element, because torch does not count all writes.
    """

    flat_param: Stepped
    grad: Tensor
    version: int
    largest: tuple[int, Tensor] | None

    @staticmethod
    def of(flat_param: Stepped, grad: Tensor) -> _Taken:
        largest = None
        if isinstance(grad, DTensor) and isinstance(flat_param, OrigParam) and flat_param.shard_numel:
            own = flat_param.own_of(grad)
            place = int(own.abs().argmax())
            largest = place, own[place : place + 1].clone()
        return _Taken(flat_param, grad, grad._version, largest)

    @property
    def has_changed(self) -> bool:
        if self.largest is None:
            return self.grad._version != self.version
        place, value = self.largest
        assert isinstance(self.flat_param, OrigParam)
        now = self.flat_param.own_of(self.grad)[place : place + 1]
        return self.grad._version != self.version or not torch.equal(now.view(torch.uint8), value.view(torch.uint8))


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"
    }


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)
