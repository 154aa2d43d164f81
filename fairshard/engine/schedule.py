"""The schedule of one backward: a list of all communication in order, the same on every rank.

It is built from the calls of the forwards that await the backward, from the last call to the first, without calls that
no rank's backward reaches. Units and calls are integers; tensors and ranks do not occur. For units 0 (around the
others), 1 and 2, called in this order::

    forward     | 0 begins | 1 begins, ends | 2 begins, ends | 0 ends |
    schedule    AT 0  GATHER 2    AT 2  GATHER 1    DONE 2  FREE 2  SEND 2    AT 1    DONE 1  FREE 1  SEND 1 ...

*Invariant*: a unit is sent once, after its last call, and freed after its last call in each forward; freed first, so
that the bucket can take the memory of the parameters. Exception: it stays gathered if the next call is one of the same
unit. Whether and where a step is in the list never depends on the reach, memory or timing of a single rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple


class Kind(IntEnum):
    """The kind of a step: a mark, which each rank passes when its own backward gets there, or an action.

    ``AT``: the backward has reached the outputs of a call. ``DONE``: it has computed all gradients inside the call.
    ``RECOMPUTE``: a checkpoint is about to run its forward again.
    """

    AT = 0
    DONE = 1
    RECOMPUTE = 2
    GATHER = 3
    SEND = 4
    FREE = 5


class Step(NamedTuple):
    """One step; ``call`` is the call of the mark, or the call that the action is for (-1: none)."""

    kind: Kind
    unit: int
    call: int = -1


class CallPlace(NamedTuple):
    """One call: the number of its unit, of its forward, and of the checkpoint that it is in (-1: none)."""

    unit: int
    forward: int
    segment: int = -1


class UnitRule(NamedTuple):
    """How one unit is treated in a backward.

    ``gathers``: whether it is gathered at all. ``frees``: whether it is freed after its last call. ``frees_between``:
    whether it is also freed when the backward of an earlier forward still needs it; for exceptions see the invariant.
    ``ahead``: the units to gather when the backward reaches it; None: the one that the backward should reach next.
    ``waits``: gather those only when this unit is done.
    """

    gathers: bool = True
    frees: bool = True
    frees_between: bool = True
    waits: bool = False
    ahead: tuple[int, ...] | None = None


@dataclass
class Schedule:
    """The ``steps``, and positions in them: of the marks, ``at`` and ``done`` by call and ``recompute`` by segment; of
    the sends that a gather follows before the next send, ``yields``.
    """

    steps: list[Step] = field(default_factory=list)
    at: dict[int, int] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    recompute: dict[int, int] = field(default_factory=dict)
    segments: dict[int, list[int]] = field(default_factory=dict)
    yields: set[int] = field(default_factory=set)

    @cached_property
    def units(self) -> set[int]:
        """The units that any step is for; for complete schedules."""
        return {step.unit for step in self.steps}

    @cached_property
    def sends(self) -> list[int]:
        """The units whose gradients are sent, in order; for complete schedules."""
        return [step.unit for step in self.steps if step.kind is Kind.SEND]


def build(
    events: Sequence[int],
    calls: Sequence[CallPlace],
    reached: Sequence[int],
    resident: Sequence[int],
    owed: Sequence[int],
    rules: Sequence[UnitRule],
) -> Schedule:
    """Build the schedule of one backward.

    Args:
        events: starts and ends of all calls, as in `Pass.events`, but numbered across all forwards.
        calls: the place of each call.
        reached: for each call, whether any rank's backward reaches it; if one of a checkpoint, all of them,
            because it runs all again.
        resident: for each unit, whether it is gathered, which is the same on all ranks (see `residency`).
        owed: for each unit, whether it has gradients to send.
        rules: the rule of each unit.
    """
    order = [~event for event in reversed(events) if event < 0 and reached[~event]]
    builder = _Builder(calls, order, resident, owed, rules)
    for event in reversed(events):
        call = event if event >= 0 else ~event
        if reached[call]:
            if event < 0:
                builder.reach(call)
            else:
                builder.finish(call)
    builder.send_rest()
    return builder.schedule


class _Builder:
    """The schedule built so far, and the units that are gathered at that point."""

    _num_reached = 0
    _last_send = -1  # position of the last send, if no gather follows it yet

    def __init__(
        self,
        calls: Sequence[CallPlace],
        order: Sequence[int],
        resident: Sequence[int],
        owed: Sequence[int],
        rules: Sequence[UnitRule],
    ) -> None:
        self.schedule = Schedule()
        self._calls, self._rules = calls, rules
        self._gathered = {unit for unit, is_there in enumerate(resident) if is_there}
        self._owed = {unit for unit, owes in enumerate(owed) if owes}
        self._first: dict[int, int] = {}  # of each unit, the first call, which the backward finishes last
        self._first_in: dict[tuple[int, int], int] = {}  # the same for each forward
        for call in sorted(order):
            unit, forward, segment = calls[call]
            self._first.setdefault(unit, call)
            self._first_in.setdefault((forward, unit), call)
            if segment >= 0:
                self.schedule.segments.setdefault(segment, []).append(call)
        self._order = order  # all calls, as the backward reaches them
        self._last_place = {calls[call].unit: place for place, call in enumerate(order)}  # there, of each unit

    def reach(self, call: int) -> None:
        """The backward reaches the outputs of ``call``."""
        unit, _, segment = self._calls[call]
        rule = self._rules[unit]
        if segment >= 0 and segment not in self.schedule.recompute:
            self.schedule.recompute[segment] = self._mark(Kind.RECOMPUTE, call)
            for other in self.schedule.segments[segment]:
                self._gather(self._calls[other].unit, other)
        self._gather(unit, call)
        self.schedule.at[call] = self._mark(Kind.AT, call)
        self._num_reached += 1
        if not rule.waits:
            self._gather_ahead(unit, call)

    def finish(self, call: int) -> None:
        """The backward has finished ``call``."""
        unit, forward, _ = self._calls[call]
        self.schedule.done[call] = self._mark(Kind.DONE, call)
        if call != self._first_in[forward, unit]:
            return
        rule, is_last = self._rules[unit], call == self._first[unit]
        following = self._next_call()
        is_next = following is not None and self._calls[following].unit == unit
        if is_last or (rule.frees_between and not is_next):
            self.schedule.steps.append(Step(Kind.FREE, unit))
            if rule.frees:
                self._gathered.discard(unit)
        if is_last:
            self._send(unit)
        if rule.waits:
            self._gather_ahead(unit, call)

    def _next_call(self) -> int | None:
        """The next call that the backward reaches."""
        return self._order[self._num_reached] if self._num_reached < len(self._order) else None

    def send_rest(self) -> None:
        """Send the gradients of units that have no call in the schedule."""
        for unit in sorted(self._owed):
            self._send(unit)

    def _mark(self, kind: Kind, call: int) -> int:
        self.schedule.steps.append(Step(kind, self._calls[call].unit, call))
        return len(self.schedule.steps) - 1

    def _send(self, unit: int) -> None:
        if unit in self._owed:
            self._owed.discard(unit)
            self._last_send = len(self.schedule.steps)
            self.schedule.steps.append(Step(Kind.SEND, unit))

    def _gather(self, unit: int, call: int) -> None:
        if unit not in self._gathered and self._rules[unit].gathers:
            self._gathered.add(unit)
            if self._last_send >= 0:
                self.schedule.yields.add(self._last_send)
                self._last_send = -1
            self.schedule.steps.append(Step(Kind.GATHER, unit, call))

    def _gather_ahead(self, unit: int, call: int) -> None:
        ahead = self._rules[unit].ahead
        following = self._next_call()
        if ahead is None and following is not None:
            self._gather(self._calls[following].unit, following)
        for other in ahead or ():
            if self._last_place.get(other, -1) >= self._num_reached:
                self._gather(other, call)
