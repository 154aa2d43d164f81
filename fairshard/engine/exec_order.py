"""In which order units are called: a hint for the next forward, and the record that a backward is planned from."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

UnitT = TypeVar("UnitT")

# Outputs that a user keeps for ever would keep forwards here for ever; beyond this many calls the oldest are dropped.
_MAX_CALLS = 1 << 14

_pass_numbers, _moments = itertools.count(), itertools.count()


class ForwardOrder(Generic[UnitT]):
    """Which unit the running forward should call next: the one that was called next in the last one. A hint."""

    def __init__(self) -> None:
        self._last: list[UnitT] = []
        self._this: list[UnitT] = []

    def begin(self) -> None:
        """A pass through the model starts."""
        if self._this:
            self._last, self._this = self._this, []

    def enter(self, unit: UnitT) -> UnitT | None:
        """``unit`` is called; returns the one that followed it in the last pass."""
        position = len(self._this)
        self._this.append(unit)
        if position + 1 < len(self._last) and self._last[position] is unit:
            return self._last[position + 1]
        return None

    def forget(self) -> None:
        """Expect nothing in the next forward: ranks may have seen different passes."""
        self._last = []
        self._this = []


@dataclass(eq=False, slots=True)
class Bracket(Generic[UnitT]):
    """One call of ``unit`` in a forward.

    ``call`` is a weak reference to what its hooks are tied to; ``node`` to what recomputes it, inside a reentrant
    checkpoint. ``is_unseen``: neither shows whether a backward reaches it. ``segment`` numbers the checkpoint that it
    is in within its pass, -1 for none. ``index`` is its place among all calls of the running backward.
    """

    unit: UnitT
    segment: int = -1
    call: weakref.ref[Any] | None = None
    node: weakref.ref[Any] | None = None
    is_unseen: bool = False
    index: int = -1

    @property
    def is_alive(self) -> bool:
        """Whether a backward could still reach the call."""
        known = (reference is not None and reference() is not None for reference in (self.call, self.node))
        return self.is_unseen or any(known)


@dataclass(eq=False)
class Pass(Generic[UnitT]):
    """A forward that awaits its backward.

    ``events`` are the beginnings and ends of its ``brackets`` in order: ``i`` where number ``i`` begins, ``~i`` where
    it ends; ``moments`` order them among those of other models. ``is_common``: every rank runs it.
    """

    is_common: bool
    number: int = field(default_factory=lambda: next(_pass_numbers))
    brackets: list[Bracket[UnitT]] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    moments: list[int] = field(default_factory=list)

    def drop(self, brackets: set[int]) -> None:
        """Forget the calls with these numbers."""
        kept = [index for index in range(len(self.brackets)) if index not in brackets]
        new = {index: place for place, index in enumerate(kept)}
        self.moments = [
            moment
            for moment, event in zip(self.moments, self.events, strict=True)
            if (event if event >= 0 else ~event) in new
        ]
        self.brackets = [self.brackets[index] for index in kept]
        self.events = [
            new[event] if event >= 0 else ~new[~event]
            for event in self.events
            if (event if event >= 0 else ~event) in new
        ]


class Record(Generic[UnitT]):
    """The forwards of one model that await their backward, and the one that runs."""

    def __init__(self) -> None:
        self.passes: list[Pass[UnitT]] = []
        self._running: Pass[UnitT] | None = None
        self._open: list[int] = []
        self._failed: set[int] = set()
        self._key: Any = None  # of the checkpoint around the last call
        self._num_segments = 0

    def begin(self, is_common: bool) -> None:
        """A pass starts whose backward may follow."""
        self._running = Pass(is_common)
        self._open, self._failed = [], set()
        self._key, self._num_segments = None, 0

    def enter(self, unit: UnitT, segment: Any) -> Bracket[UnitT] | None:
        """``unit`` is called, inside of ``segment`` if that is not None; None if no backward can follow."""
        running = self._running
        if running is None:
            return None
        bracket = Bracket(unit)
        if segment is not None:
            if segment.key is not self._key:
                self._key = segment.key
                self._num_segments += 1
            bracket.segment = self._num_segments - 1
            if segment.node is not None:
                bracket.node = weakref.ref(segment.node)
        index = len(running.brackets)
        running.brackets.append(bracket)
        running.events.append(index)
        running.moments.append(next(_moments))
        self._open.append(index)
        return bracket

    def leave(self, completed: bool) -> None:
        """The innermost call is over; one that raised is forgotten."""
        if self._running is not None and self._open:
            index = self._open.pop()
            self._running.events.append(~index)
            self._running.moments.append(next(_moments))
            if not completed:
                self._failed.add(index)

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
        """Forget all passes but these."""
        self.passes = [one for one in self.passes if one in passes]

    def __iter__(self) -> Iterator[Bracket[UnitT]]:
        return (bracket for one in self.passes for bracket in one.brackets)
