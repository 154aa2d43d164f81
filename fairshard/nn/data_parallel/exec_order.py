"""The order in which units run: recorded in one forward, used to look ahead in the next and in the backward."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

UnitT = TypeVar("UnitT")

# Forwards whose outputs are dropped never see a backward; beyond this many calls the oldest are forgotten.
_MAX_WAITING = 1 << 14


class ExecOrder(Generic[UnitT]):
    """Which unit comes next, going forward, and which came before, going back. A hint, never a contract."""

    def __init__(self) -> None:
        self._last: list[UnitT] = []
        self._this: list[UnitT] = []
        self._waiting: list[UnitT] = []  # for a backward, in the order of the forward ...
        self._is_left: list[bool] = []  # ... whether that has still to come to them ...
        self._places: dict[UnitT, list[int]] = {}  # ... and where each unit stands
        self._foreseen: dict[UnitT, int] = {}  # what should come after each that it has come to

    def begin_forward(self) -> None:
        """A pass through the model starts."""
        if self._this:
            self._last, self._this = self._this, []

    def enter(self, unit: UnitT) -> UnitT | None:
        """``unit`` starts its forward; returns the one that followed it in the last pass."""
        position = len(self._this)
        self._this.append(unit)
        if position + 1 < len(self._last) and self._last[position] is unit:
            return self._last[position + 1]
        return None

    def end_forward(self, backward_follows: bool) -> None:
        """The pass is over; with ``backward_follows`` its order, reversed, is what that will be."""
        if backward_follows:
            self._waiting += self._this
            del self._waiting[:-_MAX_WAITING]

    def begin_backward(self) -> Mapping[UnitT, int]:
        """A backward starts; returns the units that it should reach, in that order, with their number of calls."""
        self._is_left = [True] * len(self._waiting)
        self._places = {}
        self._foreseen = {}
        for position, unit in enumerate(self._waiting):
            self._places.setdefault(unit, []).append(position)
        return Counter(reversed(self._waiting))

    def reenter(self, unit: UnitT) -> UnitT | None:
        """The backward has come to ``unit``; returns the one that it should come to next.

        That is the one before it, or, for a unit around all others, whose outputs come first, the last one left.
        """
        places = self._places.get(unit)
        if not places:
            return None
        position = places.pop()
        self._is_left[position] = False
        self._foreseen[unit] = position
        for start in (position, len(self._is_left)):
            for before in range(start - 1, -1, -1):
                if self._is_left[before]:
                    self._foreseen[unit] = before
                    return self._waiting[before]
        return None

    def still_ahead(self, unit: UnitT) -> UnitT | None:
        """What `reenter` returned for ``unit``, unless the backward has come to that by now."""
        position = self._foreseen.get(unit)
        return self._waiting[position] if position is not None and self._is_left[position] else None

    def end_backward(self) -> None:
        """The backward is over."""
        self._waiting = []
        self._is_left = []
        self._places = {}
        self._foreseen = {}

    def forget(self) -> None:
        """Foresee nothing in the next forward: ranks may have seen different passes."""
        self._last = []
        self._this = []

    @property
    def recorded(self) -> Sequence[UnitT]:
        """The units that entered in the running forward, or the last one, in order."""
        return self._this
