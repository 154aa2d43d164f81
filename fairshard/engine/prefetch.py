"""Which units are gathered ahead: those that the user has named, or the one that is predicted to be next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

UnitT = TypeVar("UnitT")


class Prefetch(Generic[UnitT]):
    """The units that one unit gathers ahead; those that a forward gathers but does not run are freed at its end.

    Attributes:
        forward: units named by the user, gathered instead of the one that followed this one in the last pass.
        backward: units named by the user, gathered instead of the one that the backward should reach next.
        predicts_forward: whether a forward gathers the one that followed, if the user has named none.
    """

    def __init__(self, predicts_forward: bool) -> None:
        self.forward: tuple[UnitT, ...] = ()
        self.backward: tuple[UnitT, ...] = ()
        self.predicts_forward = predicts_forward

    def in_forward(self, predicted: UnitT | None) -> Sequence[UnitT]:
        """The units to gather before this one computes; ``predicted`` followed it in the last pass."""
        return (predicted,) if predicted is not None and self.predicts_forward and not self.forward else self.forward
