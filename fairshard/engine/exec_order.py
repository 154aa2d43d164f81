"""The order in which units are called: a hint for the next forward, and the record from which a backward is planned."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

UnitT = TypeVar("UnitT")

# A forward is recorded as long as the user keeps its outputs; beyond this many calls, the oldest forwards are dropped.
_MAX_CALLS = 1 << 14

_pass_numbers = itertools.count()
_moment = 0  # number of starts and ends of calls so far, in all models


class ForwardOrder(Generic[UnitT]):
    """Predicts which unit the running forward calls next: the one that the last forward called at that point.

    *Invariant*: forwards without gradients, which may differ among ranks as long as their gathers do not, do not change
    what is predicted for those with gradients. Otherwise ranks would gather ahead in different orders.
    """

    def __init__(self) -> None:
        self._last: list[UnitT] = []
        self._this: list[UnitT] = []
        self._trained: list[UnitT] = []
        self._evaluated: list[UnitT] = []
        self._is_trained = False
        self._position, self._num_last = 0, 0

    def begin(self, is_trained: bool = True) -> None:
        """A pass through the model starts, with gradients if ``is_trained``."""
        if self._this:
            if self._is_trained:
                self._trained = self._this
            else:
                self._evaluated = self._this
            self._this = []
        self._is_trained = is_trained
        self._last = self._trained if is_trained else self._evaluated or self._trained
        self._num_last = len(self._last)
        self._position = 0

    def enter(self, unit: UnitT) -> UnitT | None:
        """``unit`` is called; returns the unit that followed it in the last pass, or None if this pass differs."""
        position = self._position
        self._position += 1
        self._this.append(unit)
        if self._position < self._num_last and self._last[position] is unit:
            return self._last[self._position]
        return None

    def forget(self) -> None:
        """Predict nothing in the next forward, because ranks may have run different passes."""
        self._last = []
        self._this = []
        self._trained = []
        self._evaluated = []
        self._position = self._num_last = 0


class Bracket(Generic[UnitT]):
    """One call of ``unit`` in a forward.

    Attributes:
        segment: number, within the pass, of the checkpoint that it is in; -1 if none.
        call: weak reference to its `Call`, if that is tracked.
        node: weak reference to the graph node that recomputes it; None outside of reentrant checkpoints.
        is_unseen: neither ``call`` nor ``node`` shows whether a backward reaches it.
        reaches_inputs: whether a backward continues from it to its inputs; True until the call has ended.
        began: no graph node of the call has a smaller sequence number.
        versions: see `Call`.
        index: its place among all calls of the last backward that it was part of; ``plan`` identifies that backward.
    """

    __slots__ = ("began", "call", "index", "is_unseen", "node", "plan", "reaches_inputs", "segment", "unit", "versions")

    def __init__(self, unit: UnitT, segment: int = -1) -> None:
        self.unit = unit
        self.segment = segment
        self.index = -1
        self.call: weakref.ref[Any] | None = None
        self.node: weakref.ref[Any] | None = None
        self.is_unseen = False
        self.reaches_inputs = True
        self.began = 0
        self.versions: list[int] = []
        self.plan: object = None

    @property
    def is_alive(self) -> bool:
        """Whether a backward could still reach the call."""
        known = (reference is not None and reference() is not None for reference in (self.call, self.node))
        return self.is_unseen or any(known)


@dataclass(eq=False)
class Pass(Generic[UnitT]):
    """A forward that awaits its backward.

    ``events``: the starts and ends of its ``brackets`` in order: ``i`` where bracket ``i`` starts, ``~i`` where it
    ends. ``jumps``: the moments of events that do not directly follow the previous one, because another model was
    called in between; by position in ``events``. ``starts``: for each checkpoint, the smallest sequence number of its
    nodes. ``is_common``: every rank runs the pass.
    """

    is_common: bool
    number: int = field(default_factory=lambda: next(_pass_numbers))
    brackets: list[Bracket[UnitT]] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    jumps: dict[int, int] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)

    @property
    def moments(self) -> list[int]:
        """For each event, a number that orders it among the events of all models."""
        moments: list[int] = []
        for position in range(len(self.events)):
            moments.append(self.jumps[position] if position in self.jumps else moments[-1] + 1)
        return moments

    def drop(self, brackets: set[int]) -> None:
        """Forget the calls with these numbers."""
        kept = [index for index in range(len(self.brackets)) if index not in brackets]
        new = {index: place for place, index in enumerate(kept)}
        moments = [
            moment
            for moment, event in zip(self.moments, self.events, strict=True)
            if (event if event >= 0 else ~event) in new
        ]
        self.jumps = dict(enumerate(moments))
        self.brackets = [self.brackets[index] for index in kept]
        self.events = [
            new[event] if event >= 0 else ~new[~event]
            for event in self.events
            if (event if event >= 0 else ~event) in new
        ]


class Record(Generic[UnitT]):
    """The forwards of one model that await their backward, and the running one."""

    def __init__(self) -> None:
        self.passes: list[Pass[UnitT]] = []
        self._running: Pass[UnitT] | None = None
        self._open: list[int] = []
        self._failed: set[int] = set()
        self._key: Any = None  # of the checkpoint around the last call
        self._num_calls = self._num_events = self._last_moment = 0

    def begin(self, is_common: bool) -> None:
        """A pass starts that a backward may follow."""
        self._running = Pass(is_common)
        self._open, self._failed = [], set()
        self._key = None
        self._num_calls = self._num_events = 0
        self._last_moment = -1

    def enter(self, unit: UnitT, segment: Any) -> Bracket[UnitT] | None:
        """``unit`` is called, inside ``segment`` if not None; returns None if no backward can follow."""
        running = self._running
        if running is None:
            return None
        bracket = Bracket(unit)
        if segment is not None:
            if segment.key is not self._key:
                self._key = segment.key
                before = running.brackets[-1].began if running.brackets else 0
                running.starts.append(max(segment.start, before))
            bracket.segment = len(running.starts) - 1
            if segment.node is not None:
                bracket.node = weakref.ref(segment.node)
        index = self._num_calls
        self._num_calls += 1
        self._open.append(index)
        running.brackets.append(bracket)
        self._note(running, index)
        return bracket

    def leave(self, completed: bool) -> None:
        """The innermost call is over; forgets a call that raised (not ``completed``)."""
        if self._running is not None and self._open:
            index = self._open.pop()
            self._note(self._running, ~index)
            if not completed:
                self._failed.add(index)

    def _note(self, running: Pass[UnitT], event: int) -> None:
        global _moment
        _moment += 1
        if _moment != self._last_moment + 1:
            running.jumps[self._num_events] = _moment
        self._last_moment = _moment
        self._num_events += 1
        running.events.append(event)

    def end(self, completed: bool) -> None:
        """The pass is over; with ``completed`` it awaits its backward."""
        running, self._running, self._key = self._running, None, None
        if running is None or not completed:
            return
        if self._failed:
            running.drop(self._failed)
        if running.brackets:
            self.passes.append(running)
            while len(self.passes) > 1 and sum(len(one.brackets) for one in self.passes) > _MAX_CALLS:
                del self.passes[0]

    def keep(self, passes: Sequence[Pass[UnitT]]) -> None:
        """Forget all passes except these."""
        self.passes = [one for one in self.passes if one in passes]

    def __iter__(self) -> Iterator[Bracket[UnitT]]:
        return (bracket for one in self.passes for bracket in one.brackets)


def around(events: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The calls during which one of the ``chosen`` calls began, outermost first; ``events`` as in `Pass`."""
    open_calls: dict[int, None] = {}
    found: dict[int, None] = {}
    for event in events:
        if event < 0:
            open_calls.pop(~event, None)
            continue
        if chosen[event]:
            found.update(open_calls)
        open_calls[event] = None
    return list(found)
