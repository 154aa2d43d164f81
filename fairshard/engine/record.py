"""The calls of units in the order of the forward: a hint for the next forward, and the list that a backward walks back.

The graph owns a call's hooks (`CallHooks`); the record refers to them weakly. A pass whose hooks are all gone can be
reached no more.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from enum import IntEnum
from itertools import count
from types import FrameType
from typing import Any, Generic, TypeVar

UnitT = TypeVar("UnitT")

# A pass is recorded as long as the user keeps its outputs; beyond this many calls, the oldest passes are dropped.
_MAX_CALLS = 1 << 14


class ForwardOrder(Generic[UnitT]):
    """Predicts which unit the running forward calls next: the one that the last forward called at that point.

    *Invariant*: forwards without gradients, which may differ among ranks as long as their gathers do not, do not change
    what is predicted for those with gradients. Otherwise ranks would gather ahead in different orders.
    """

    _expected: Sequence[UnitT] = ()

    def __init__(self) -> None:
        self._last: dict[bool, list[UnitT]] = {}

    def begin(self, is_trained: bool = True) -> None:
        """A pass through the model starts, with gradients if ``is_trained``."""
        self._expected = self._last.get(is_trained) or self._last.get(True, [])
        self._this = self._last[is_trained] = []

    def enter(self, unit: UnitT) -> UnitT | None:
        """``unit`` is called; returns the unit that followed it in the last pass, or None if this pass differs."""
        position = len(self._this)
        self._this.append(unit)
        if position + 1 < len(self._expected) and self._expected[position] is unit:
            return self._expected[position + 1]
        return None

    def forget(self) -> None:
        """Predict nothing in the next forward, because ranks may have run different passes."""
        self._last.clear()


class Sight(IntEnum):
    """What shows whether a backward reaches a call.

    ``NONE``: it has no graph. ``HOOKS``: hooks on its outputs. ``LEAVES``: its leaves alone, because the graph hangs
    on tensors that the call did not return in the open. ``LATER``: a checkpoint makes its graph in the backward.
    """

    NONE = 0
    HOOKS = 1
    LEAVES = 2
    LATER = 3


class CallRecord(Generic[UnitT]):
    """One call of ``unit`` in a pass.

    Attributes:
        segment: number of the checkpoint that runs it again, as in `Checkpoints`; -1 if none.
        around: the call in which it began, if any.
        sight: what shows whether a backward reaches it.
        hooks: weak reference to its `CallHooks`, if outputs carry a graph.
        versions: version counters of the unit's shards when they were gathered.
        index: its number in the schedule of the last backward that it was part of.
    """

    __slots__ = ("around", "hooks", "index", "segment", "sight", "unit", "versions")

    def __init__(self, unit: UnitT, segment: int = -1, around: CallRecord[UnitT] | None = None) -> None:
        self.unit, self.segment, self.around = unit, segment, around
        self.sight = Sight.NONE
        self.hooks: weakref.ref[Any] | None = None
        self.versions: Sequence[int] = ()
        self.index = -1


class Token:
    """Lives as long as a pass runs, or any hook of it lives."""

    __slots__ = ("__weakref__",)


class Pass(Generic[UnitT]):
    """The calls inside one outermost call.

    Attributes:
        is_common: every rank runs the pass.
        calls: all, in the order in which they began.
        events: ``i`` where the call ``calls[i]`` begins, ``~i`` where it ends.
        was_reached: a backward has been planned with it.
        place: its number among all passes of this rank; ``number``: among those that the same model has begun.
    """

    place = number = 0

    def __init__(self, token: Token | None = None, is_common: bool = True) -> None:
        self.is_common = is_common
        self.calls: list[CallRecord[UnitT]] = []
        self.events: list[int] = []
        self.was_reached = False
        self._token = weakref.ref(Token() if token is None else token)
        self._open: list[int] = []

    @property
    def is_alive(self) -> bool:
        """Whether a backward may reach it; one whose calls have no hooks awaits one backward."""
        is_unseen = not self.was_reached and any(call.sight > Sight.HOOKS for call in self.calls)
        return is_unseen or self._token() is not None

    def goes_only_through(self, units: Collection[UnitT]) -> bool:
        """Whether all its calls are calls of ``units``."""
        return all(call.unit in units for call in self.calls)

    def enter(self, unit: UnitT, segment: int = -1) -> CallRecord[UnitT]:
        """A call begins; ``segment``: see `CallRecord`."""
        return self._begin(CallRecord(unit, segment, self.calls[self._open[-1]] if self._open else None))

    def _begin(self, call: CallRecord[UnitT]) -> CallRecord[UnitT]:
        self._open.append(len(self.calls))
        self.events.append(len(self.calls))
        self.calls.append(call)
        return call

    def leave(self) -> None:
        """The innermost call has ended."""
        self.events.append(~self._open.pop())

    def cut(self, token: Token) -> Pass[UnitT]:
        """End the pass without its open calls, because a backward begins; returns the pass in which they go on."""
        rest = Pass[UnitT](token, self.is_common)
        for index in self._open:
            rest._begin(self.calls[index]).segment = -1
        ended = [index for index in range(len(self.calls)) if index not in self._open]
        new = dict(zip(ended, count()))
        new |= {~index: ~place for index, place in new.items()}
        self.calls[:] = [self.calls[index] for index in ended]
        self.events[:] = [new[event] for event in self.events if event in new]
        for call in self.calls:
            if call.around in rest.calls:
                call.around = None
        return rest


class Checkpoints:
    """Numbers the checkpoints that calls run in; one may be around passes of several models."""

    def __init__(self) -> None:
        self._new = count()
        self._of_hooks: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._of_frames: dict[Any, int] = {}  # of the running pass: a frame would keep the inputs of its checkpoint

    def number_of(self, key: Any) -> int:
        """The number of the running checkpoint; ``key``: see `current_checkpoint`."""
        numbers = self._of_frames if isinstance(key, FrameType) else self._of_hooks
        if key not in numbers:
            numbers[key] = next(self._new)
        return numbers[key]

    def end_pass(self) -> None:
        """The outermost call has ended."""
        self._of_frames.clear()


class Record(Generic[UnitT]):
    """The passes that began with one model and await a backward; it keeps them, so they end with it."""

    def __init__(self) -> None:
        self.passes: list[Pass[UnitT]] = []
        self._numbers = count(1)

    def add(self, one: Pass[UnitT], place: int) -> None:
        """``one``, which has calls, is over; ``place``: see `Pass`."""
        one.place, one.number = place, next(self._numbers)
        self.passes.append(one)
        while len(self.passes) > 1 and sum(len(each.calls) for each in self.passes) > _MAX_CALLS:
            del self.passes[0]
