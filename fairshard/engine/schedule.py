"""The schedule of one backward: a list of all communication in order, the same on every rank.

It is built from the calls of the forwards that await the backward, from the last call to the first, without calls that
no rank's backward reaches. Units and calls are integers; tensors and ranks do not occur. For units 0 (around the
others), 1 and 2, called in this order::

    forward     | 0 begins | 1 begins, ends | 2 begins, ends | 0 ends |
    schedule    AT 0  GATHER 2    AT 2  GATHER 1    DONE 2  FREE 2  SEND 2    AT 1    DONE 1  FREE 1  SEND 1 ...

*Invariant*: a unit is sent once, after its last call. A FREE step follows its last call in each forward, before SEND,
so that the bucket can take the memory of the parameters, and not where the next call is one of the same unit;
`residency` says whether it frees. Whether and where a step is in the list never depends on the reach, memory or timing
of a single rank.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
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

    ``frees``: whether it is freed after its last call, and then needs a gather. ``frees_between``: whether it is also
    freed when the backward of an earlier forward still needs it; for exceptions see the invariant. ``ahead``: the units
    to gather when the backward reaches it, or none; None: the one that the backward should reach next. ``waits``:
    gather those only when this unit is done. `Plan` makes it.
    """

    frees: bool = True
    frees_between: bool = True
    waits: bool = False
    ahead: tuple[int, ...] | None = None


@dataclass
class Schedule:
    """The ``steps``, and positions in them: of the marks, ``at`` and ``done`` by call and ``recompute`` by segment.

    Attributes:
        segments: the calls of each checkpoint, in order.
        sends: the units whose gradients are sent, in order.
        yields: those of ``sends`` with a gather before the next send.
    """

    steps: list[Step] = field(default_factory=list)
    at: dict[int, int] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    recompute: dict[int, int] = field(default_factory=dict)
    segments: dict[int, list[int]] = field(default_factory=dict)
    sends: list[int] = field(default_factory=list)
    yields: set[int] = field(default_factory=set)


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
        resident: for each unit, whether it needs no gather: it is gathered, which is the same on all ranks (see
            `residency`), or never is in a backward.
        owed: for each unit, whether it has gradients to send.
        rules: the rule of each unit.
    """
    schedule = Schedule()
    steps, segments = schedule.steps, schedule.segments
    gathered = {unit for unit, is_there in enumerate(resident) if is_there}
    walk = [event for event in reversed(events) if reached[event if event >= 0 else ~event]]
    ahead = deque(~event for event in walk if event < 0)  # calls that the backward has not reached, in its order
    num_ahead = Counter(calls[call].unit for call in ahead)
    last = {calls[event].unit: event for event in walk if event >= 0}  # of each unit, the call that it finishes last
    last_in = {calls[event][:2]: event for event in walk if event >= 0}  # the same for each unit and forward
    for call in sorted(ahead):
        if calls[call].segment >= 0:
            segments.setdefault(calls[call].segment, []).append(call)

    def gather(unit: int, call: int) -> None:
        if unit not in gathered:
            gathered.add(unit)
            schedule.yields.update(schedule.sends[-1:])
            steps.append(Step(Kind.GATHER, unit, call))

    def gather_ahead(unit: int, call: int) -> None:
        if rules[unit].ahead is None and ahead:
            gather(calls[ahead[0]].unit, ahead[0])
        for other in rules[unit].ahead or ():
            if num_ahead[other]:
                gather(other, call)

    def send(unit: int) -> None:
        schedule.sends.append(unit)
        steps.append(Step(Kind.SEND, unit))

    for event in walk:
        call = event if event >= 0 else ~event
        unit, forward, segment = calls[call]
        rule = rules[unit]
        if event < 0:  # the backward reaches the outputs of the call
            ahead.popleft()
            num_ahead[unit] -= 1
            if segment >= 0 and segment not in schedule.recompute:
                schedule.recompute[segment] = len(steps)
                steps.append(Step(Kind.RECOMPUTE, unit, call))
                for other in segments[segment]:
                    gather(calls[other].unit, other)
            gather(unit, call)
            schedule.at[call] = len(steps)
            steps.append(Step(Kind.AT, unit, call))
            if not rule.waits:
                gather_ahead(unit, call)
            continue
        schedule.done[call] = len(steps)
        steps.append(Step(Kind.DONE, unit, call))
        if call != last_in[unit, forward]:
            continue
        is_next = bool(ahead) and calls[ahead[0]].unit == unit
        if call == last[unit] or (rule.frees_between and not is_next):
            steps.append(Step(Kind.FREE, unit))
            if rule.frees:
                gathered.discard(unit)
        if call == last[unit] and owed[unit]:
            send(unit)
        if rule.waits:
            gather_ahead(unit, call)
    for unit, owes in enumerate(owed):
        if owes and unit not in last:
            send(unit)
    return schedule
