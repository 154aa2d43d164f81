"""The order in which units run: recorded in one forward, used to look ahead in the next and in the backward."""

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

UnitT = TypeVar("UnitT")

# Forwards whose outputs are dropped never see a backward; beyond this many calls the oldest are forgotten.
_MAX_WAITING = 1 << 14


@dataclass
class _Pass(Generic[UnitT]):
    """A forward that awaits its backward: its calls as they began and as they ended, and which are still to come."""

    entered: list[UnitT]
    exited: list[UnitT]
    is_due: list[bool]


class ExecOrder(Generic[UnitT]):
    """Which unit comes next, going forward, and which going back. A hint, never a contract.

    A backward comes to units as their calls ended, the other way round: to one around others before it comes to those,
    and to what was called before them after that. It is through with them as their calls began, the other way round.

    Attributes:
        exited: the units that have ended in the running forward, in order; appended to by whoever runs it.
        is_later: whether an earlier forward than the running one, or the last one, awaits its backward.
    """

    def __init__(self) -> None:
        self.exited: list[UnitT] = []
        self.is_later = False
        self._last: list[UnitT] = []
        self._this: list[UnitT] = []
        self._waiting: list[_Pass[UnitT]] = []  # for a backward, of which ...
        self._line: list[UnitT] = []  # ... these are all calls, in the order of their end ...
        self._is_left: list[bool] = []  # ... whether the running backward has still to come to them ...
        self._is_due: list[bool] = []  # ... or any has ...
        self._places: dict[UnitT, list[int]] = {}  # ... and where each unit's stand that are due
        self._came_to: dict[UnitT, int] = {}  # the last of each unit's that it has come to
        self._starts: list[int] = []  # where each forward begins
        self._foreseen: dict[UnitT, int] = {}  # what should come after each that it has come to

    def begin_forward(self) -> None:
        """A pass through the model starts."""
        if self._this:
            self._last, self._this = self._this, []
        self.exited = []
        self.is_later = bool(self._waiting)

    def enter(self, unit: UnitT) -> UnitT | None:
        """``unit`` starts its forward; returns the one that followed it in the last pass."""
        position = len(self._this)
        self._this.append(unit)
        if position + 1 < len(self._last) and self._last[position] is unit:
            return self._last[position + 1]
        return None

    def end_forward(self, backward_follows: bool) -> None:
        """The pass is over; with ``backward_follows`` its order, reversed, is what that will be."""
        if backward_follows and self.exited:
            self._waiting.append(_Pass(self._this, self.exited, [True] * len(self.exited)))
            while len(self._waiting) > 1 and sum(len(one.exited) for one in self._waiting) > _MAX_WAITING:
                del self._waiting[0]

    def begin_backward(self) -> Mapping[UnitT, int]:
        """A backward starts; returns the units that it should reach, with their number of calls.

        They are in the order in which it should be through with them.
        """
        self.is_later = False
        self._line = [unit for one in self._waiting for unit in one.exited]
        self._is_due = [is_due for one in self._waiting for is_due in one.is_due]
        self._is_left = [True] * len(self._line)
        lengths = [len(one.exited) for one in self._waiting]
        self._starts = list(itertools.accumulate(lengths, initial=0))
        self._places = {}
        self._came_to = {}
        self._foreseen = {}
        for position, unit in enumerate(self._line):
            if self._is_due[position]:
                self._places.setdefault(unit, []).append(position)
        entered = Counter(unit for one in reversed(self._waiting) for unit in reversed(one.entered))
        return {unit: len(self._places[unit]) for unit in entered if unit in self._places}

    def reenter(self, unit: UnitT) -> UnitT | None:
        """The backward has come to ``unit``; returns the one that it should come to next."""
        places = self._places.get(unit)
        if not places:
            return None
        position = places.pop()
        self._is_left[position] = self._is_due[position] = False
        self._foreseen[unit] = self._came_to[unit] = position
        for before in range(position - 1, -1, -1):
            if self._is_left[before] and self._line[before] is not unit:
                self._foreseen[unit] = before
                return self._line[before]
        return None

    def still_ahead(self, unit: UnitT) -> UnitT | None:
        """What `reenter` returned for ``unit``, unless the backward has come to that by now."""
        position = self._foreseen.get(unit)
        return self._line[position] if position is not None and self._is_left[position] else None

    def comes_again(self, unit: UnitT) -> bool:
        """Whether the backward, through with ``unit`` in the forward in which it came to it, will in an earlier one."""
        places, position = self._places.get(unit), self._came_to.get(unit)
        if not places or position is None:
            return False
        return bisect_right(self._starts, places[-1]) < bisect_right(self._starts, position)

    def end_backward(self, is_last: bool = True) -> None:
        """The backward is over; unless it ``is_last``, forwards that it has not come to the whole of go on waiting."""
        waiting, self._waiting = self._waiting, []
        start = 0
        for one in () if is_last else waiting:
            one.is_due = self._is_due[start : start + len(one.exited)]
            start += len(one.exited)
            if any(one.is_due):
                self._waiting.append(one)
        self._line = []
        self._is_left = []
        self._is_due = []
        self._starts = []
        self._places = {}
        self._came_to = {}
        self._foreseen = {}

    def forget(self) -> None:
        """Foresee nothing in the next forward: ranks may have seen different passes."""
        self._last = []
        self._this = []
