"""Which units are gathered ahead of which: those that a user named, or the one that the last pass foretells."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Generic, TypeVar

from fairshard.settings.config import UnitConfig
from fairshard.settings.fsdp1 import BackwardPrefetch

UnitT = TypeVar("UnitT")


class Prefetch(Generic[UnitT]):
    """What one unit gathers ahead. Units are freed at the end of a pass that gathered them and did not run them.

    A backward that is not the last one of its forward leaves them to the next.

    Attributes:
        forward: named by the user, to be gathered in place of the unit that followed this one in the last pass.
        backward: named by the user, to be gathered in place of the one that the backward should come to next.
        waits_for_grads: whether in a backward the unit gathers others only once it has its gradients and is freed.
    """

    def __init__(self, config: UnitConfig) -> None:
        self.forward: tuple[UnitT, ...] = ()
        self.backward: tuple[UnitT, ...] = ()
        self._forward: tuple[UnitT, ...] = ()
        self._backward: tuple[UnitT, ...] = ()
        self.is_forward_on = config.forward_prefetch is not False
        self._is_backward_on = config.backward_prefetch is not None
        self.waits_for_grads = config.backward_prefetch is BackwardPrefetch.BACKWARD_POST

    def settle(self, units: Collection[UnitT]) -> None:
        """Follow what was named, as far as it is among ``units``, those of one model."""
        self._forward = tuple(unit for unit in self.forward if unit in units)
        self._backward = tuple(unit for unit in self.backward if unit in units)

    def in_forward(self, foreseen: UnitT | None) -> Sequence[UnitT]:
        """What to gather before the unit computes; ``foreseen`` followed it in the last pass."""
        if self._forward or foreseen is None or not self.is_forward_on:
            return self._forward
        return (foreseen,)

    def in_backward(self, foreseen: UnitT | None) -> Sequence[UnitT]:
        """What to gather before the unit computes its gradients or, if that waits for them, after."""
        if self._backward or foreseen is None or not self._is_backward_on:
            return self._backward
        return (foreseen,)
