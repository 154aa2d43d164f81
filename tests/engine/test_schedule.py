"""The schedule of a backward is pure integers, so every rule can be read from the list."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairshard.engine.schedule import CallPlace, Kind, UnitRule, build

pytestmark = pytest.mark.behaviour("the schedule")

# One forward of unit 0, which calls units 1..n in order.
CHAIN = [0, 1, ~1, 2, ~2, ~0]


@st.composite
def forwards(draw):
    """Some forwards of nested calls: ``(num_units, events, calls)``, numbered across all forwards."""
    num_units = draw(st.integers(1, 4))
    events, calls = [], []

    def call(forward, depth):
        index = len(calls)
        calls.append(CallPlace(draw(st.integers(0, num_units - 1)), forward))
        events.append(index)
        for _ in range(draw(st.integers(0, 2)) if depth < 3 else 0):
            call(forward, depth + 1)
        events.append(~index)

    for forward in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(1, 2))):
            call(forward, 0)
    return num_units, events, calls


rules = st.builds(
    UnitRule,
    frees=st.booleans(),
    frees_between=st.booleans(),
    waits=st.booleans(),
    ahead=st.one_of(st.none(), st.just(()), st.just((0,))),
)


@given(forwards(), st.data())
def test_what_holds_for_every_schedule(model, data):
    """A unit is gathered before it is used, never while already gathered, and sent once, after its calls.

    A send yields if a gather comes before the next send.
    """
    num_units, events, calls = model
    reached = data.draw(st.lists(st.sampled_from([0, 1]), min_size=len(calls), max_size=len(calls)))
    resident = data.draw(st.lists(st.booleans(), min_size=num_units, max_size=num_units))
    owed = data.draw(st.lists(st.booleans(), min_size=num_units, max_size=num_units))
    rule = data.draw(st.lists(rules, min_size=num_units, max_size=num_units))
    schedule = build(events, calls, reached, resident, owed, rule)
    gathered = {unit for unit in range(num_units) if resident[unit]}
    open_calls: dict[int, int] = {}
    for position, step in enumerate(schedule.steps):
        if step.kind is Kind.GATHER:
            assert step.unit not in gathered
            assert any(calls[call].unit == step.unit for call, is_reached in enumerate(reached) if is_reached)
            gathered.add(step.unit)
        elif step.kind is Kind.FREE:
            if rule[step.unit].frees:
                gathered.discard(step.unit)
        elif step.kind is Kind.AT:
            open_calls[step.unit] = open_calls.get(step.unit, 0) + 1
        elif step.kind is Kind.DONE:
            assert step.unit in gathered
            open_calls[step.unit] -= 1
        elif step.kind is Kind.SEND:
            later = schedule.steps[position:]
            assert not any(other.kind in (Kind.AT, Kind.DONE) and other.unit == step.unit for other in later)
    moves = [(step.unit, step.kind) for step in schedule.steps if step.kind in (Kind.SEND, Kind.GATHER)]
    followed = {unit for (unit, kind), (_, after) in pairwise(moves) if (kind, after) == (Kind.SEND, Kind.GATHER)}
    assert schedule.yields == followed
    marks = [step.call for step in schedule.steps if step.kind is Kind.AT]
    assert sorted(marks) == [call for call, is_reached in enumerate(reached) if is_reached]
    assert sorted(schedule.sends) == [unit for unit in range(num_units) if owed[unit]]


def words(*args):
    """A schedule in words: one line for each mark, with the actions that follow it."""
    lines = []
    for step in build(*args).steps:
        word = step.kind.name.lower()
        if step.kind <= Kind.RECOMPUTE or not lines:
            lines.append(f"{word} {step.unit}")
        else:
            lines[-1] += f"  > {word} {step.unit}"
    return lines


def test_a_chain():
    """The next unit is gathered while one computes; each is sent and freed when its backward is done."""
    calls = [CallPlace(unit, 0) for unit in range(3)]
    assert words(CHAIN, calls, [1, 1, 1], [1, 0, 0], [1, 1, 1], [UnitRule()] * 3) == [
        "at 0  > gather 2",
        "at 2  > gather 1",
        "done 2  > free 2  > send 2",
        "at 1",
        "done 1  > free 1  > send 1",
        "done 0  > free 0  > send 0",
    ]


def test_what_nobody_reaches_is_not_listed():
    """Unreached units are neither gathered nor sent, except that gradients of earlier backwards are sent at the end."""
    calls = [CallPlace(unit, 0) for unit in range(3)]
    assert words(CHAIN, calls, [1, 1, 0], [1, 0, 0], [1, 1, 1], [UnitRule()] * 3) == [
        "at 0  > gather 1",
        "at 1",
        "done 1  > free 1  > send 1",
        "done 0  > free 0  > send 0  > send 2",
    ]


def test_a_checkpoint_gathers_all_its_units_first():
    """It gathers its units in the order of recomputation, also one that owes no gradient."""
    calls = [CallPlace(0, 0), CallPlace(1, 0, segment=0), CallPlace(2, 0, segment=0)]
    assert words(CHAIN, calls, [1, 1, 1], [1, 0, 0], [1, 0, 1], [UnitRule(ahead=())] * 3) == [
        "at 0",
        "recompute 2  > gather 1  > gather 2",
        "at 2",
        "done 2  > free 2  > send 2",
        "at 1",
        "done 1  > free 1",
        "done 0  > free 0  > send 0",
    ]


def test_several_forwards():
    """A unit is freed after each forward's part of the backward, unless needed next, and sent after the last part."""
    events = [*CHAIN, *(event + 3 if event >= 0 else event - 3 for event in CHAIN)]
    calls = [CallPlace(unit, forward) for forward in (0, 1) for unit in range(3)]
    assert words(events, calls, [1] * 6, [1, 0, 0], [1] * 3, [UnitRule(ahead=())] * 3) == [
        *("at 0  > gather 2", "at 2", "done 2  > free 2  > gather 1", "at 1", "done 1  > free 1", "done 0"),
        *("at 0  > gather 2", "at 2", "done 2  > free 2  > send 2  > gather 1"),
        *("at 1", "done 1  > free 1  > send 1", "done 0  > free 0  > send 0"),
    ]
