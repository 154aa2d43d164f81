"""A dynamic loss scale for fp16 on sharded gradients."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class LossScale:
    """Keeps fp16 gradients from underflowing: halves on overflow, doubles after a while without one.

    Whether a step overflowed is the caller's to say, from a number that is equal on all ranks (the total
    gradient norm). *Invariant*: all ranks hold the same ``value``.
    """

    def __init__(self, value: float = 2.0**16, growth_interval: int = 200) -> None:
        self.value = value
        self._growth_interval = growth_interval
        self._good_steps = 0

    def unscale_(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide every gradient by the scale, in place; exact, for the scale is a power of two."""
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / self.value)

    def update(self, overflowed: bool) -> None:
        """Adapt to one step."""
        if overflowed:
            self.value /= 2
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self._growth_interval:
            self.value *= 2
            self._good_steps = 0
