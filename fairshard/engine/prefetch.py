"""Which units are gathered ahead: those that the user has named, or the one that is predicted to be next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Generic, TypeVar

from fairshard.params.rule import Rule

UnitT = TypeVar("UnitT")


class Prefetch(Generic[UnitT]):
    """The units that one unit gathers ahead; those that a forward gathers but does not run are freed at its end.

    Attributes:
        forward: units named by the user, gathered instead of the one that followed this one in the last pass.
        backward: units named by the user, gathered instead of the one that the backward should reach next.
        ahead_in_backward: units to gather when a backward reaches this one; None: the one that it should reach next.
        waits_for_grads: whether, in a backward, it gathers them only after its own gradients are ready and it is freed.
    """

    def __init__(self, rule: Rule) -> None:
        self.forward: tuple[UnitT, ...] = ()
        self.backward: tuple[UnitT, ...] = ()
        self._forward: tuple[UnitT, ...] = ()
        self.is_forward_on = rule.prefetches_in_forward
        self._is_backward_on = rule.prefetches_in_backward
        self.waits_for_grads = rule.prefetches_late
        self.ahead_in_backward: tuple[UnitT, ...] | None = None if self._is_backward_on else ()

    def choose_among(self, units: Collection[UnitT]) -> None:
        """Use those units that the user has named and that are in ``units``, the units of one model."""
        self._forward = tuple(unit for unit in self.forward if unit in units)
        backward = tuple(unit for unit in self.backward if unit in units)
        self.ahead_in_backward = backward if backward or not self._is_backward_on else None

    def in_forward(self, predicted: UnitT | None) -> Sequence[UnitT]:
        """The units to gather before this one computes; ``predicted`` followed it in the last pass."""
        if self._forward or predicted is None or not self.is_forward_on:
            return self._forward
        return (predicted,)
