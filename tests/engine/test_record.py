"""The order of the last forward is a hint for the next; a backward is planned from the record of forwards."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairshard.engine.record import Checkpoints, ForwardOrder, Pass, Record, Sight, Token

pytestmark = pytest.mark.behaviour("the record of calls")

passes = st.lists(st.sampled_from("abcd"), max_size=8)
# A forward as nested calls: [("a", [("b", [])]), ("c", [])].
calls = st.recursive(
    st.lists(st.tuples(st.sampled_from("abcd"), st.just([])), max_size=3),
    lambda inner: st.lists(st.tuples(st.sampled_from("abcd"), inner), max_size=3),
    max_leaves=8,
)


def forward(order, units):
    """One forward over ``units``; returns the prediction at each entry."""
    order.begin()
    return [order.enter(unit) for unit in units]


@given(passes)
def test_a_repeated_pass_is_predicted(units):
    """The second time, each unit but the last predicts its successor."""
    order = ForwardOrder()
    assert forward(order, units) == [None] * len(units)
    assert forward(order, units) == [*units[1:], None][: len(units)]


@given(passes, passes)
def test_another_pass_gives_hints_from_the_last_one_only(first, second):
    """Each predicted unit followed that unit, at that place, in the last pass."""
    order = ForwardOrder()
    forward(order, first)
    for position, ahead in enumerate(forward(order, second)):
        if ahead is not None:
            assert first[position] == second[position]
            assert first[position + 1] == ahead


def run(one, tree):
    """Record nested calls."""
    for unit, inner in tree:
        one.enter(unit)
        run(one, inner)
        one.leave()


def spelled(one):
    """A recorded pass as a string: the unit's name where a call begins, its capital where the call ends."""
    return "".join(one.calls[event].unit if event >= 0 else one.calls[~event].unit.upper() for event in one.events)


def spelled_tree(tree):
    return "".join(unit + spelled_tree(inner) + unit.upper() for unit, inner in tree)


@given(calls)
def test_a_record_nests_as_the_calls_did(tree):
    """Each call begins before and ends after those inside it."""
    one = Pass()
    run(one, tree)
    assert spelled(one) == spelled_tree(tree)


@given(calls)
def test_calls_know_the_call_around_them(tree):
    """The call around each is the one that began last and has not ended."""
    one, running = Pass(), []
    run(one, tree)
    for event in one.events:
        if event < 0:
            assert running.pop() is one.calls[~event]
        else:
            assert one.calls[event].around is (running[-1] if running else None)
            running.append(one.calls[event])


def test_checkpoints_are_numbered():
    """Calls of one checkpoint get the same number, also in another pass; those of the next one get another."""
    checkpoints = Checkpoints()
    first, second, frame = (lambda: 0), (lambda: 0), sys._getframe()
    assert [checkpoints.number_of(key) for key in (first, first, second, frame, frame)] == [0, 0, 1, 2, 2]
    checkpoints.end_pass()
    assert [checkpoints.number_of(key) for key in (second, frame)] == [1, 3]
    del second
    assert checkpoints.number_of(lambda: 0) == 4


def test_a_pass_is_alive_as_long_as_its_hooks():
    """It dies with the last hook of its calls; one whose calls have none awaits one backward."""
    hook = Token()
    one = Pass(hook)
    one.enter("a")
    one.leave()
    assert one.is_alive
    del hook
    assert not one.is_alive
    one.calls[0].sight = Sight.LEAVES
    assert one.is_alive
    one.was_reached = True
    assert not one.is_alive


def test_a_pass_is_cut_where_a_backward_begins_in_it():
    """The calls that have ended await the backward; those that have not go on in the pass."""
    one = Pass()
    outer = one.enter("a")
    inner = one.enter("b")
    one.leave()
    rest = one.cut(Token())
    assert (one.calls, one.events) == ([inner], [0, ~0])
    assert inner.around is None
    later = rest.enter("c")
    rest.leave()
    rest.leave()
    assert (rest.calls, spelled(rest)) == ([outer, later], "acCA")


def test_the_oldest_passes_are_dropped():
    """Forwards of which no backward comes do not pile up."""
    record = Record()
    for place in range(3):
        one = Pass()
        for _ in range(1 << 13):
            one.enter("a")
            one.leave()
        record.add(one, place)
    assert [(one.place, one.number) for one in record.passes] == [(1, 2), (2, 3)]
