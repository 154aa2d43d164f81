"""The order of the last forward is a hint for the next; a backward is planned from the record of forwards."""

import gc
import weakref

from hypothesis import given
from hypothesis import strategies as st

from fairshard.engine.exec_order import ForwardOrder, Record
from fairshard.engine.segments import Segment

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


def run(record, tree, failing=()):
    """Record nested calls; units in ``failing`` raise, and their callers continue."""
    for unit, inner in tree:
        record.enter(unit, None)
        run(record, inner, failing)
        record.leave(completed=unit not in failing)


def spelled(one):
    """A recorded pass as a string: the unit's name where a call begins, its capital where the call ends."""
    return "".join(
        one.brackets[event].unit if event >= 0 else one.brackets[~event].unit.upper() for event in one.events
    )


def spelled_tree(tree, failing=()):
    inside = ((unit, spelled_tree(inner, failing)) for unit, inner in tree)
    return "".join(text if unit in failing else unit + text + unit.upper() for unit, text in inside)


@given(calls, st.sets(st.sampled_from("abcd")))
def test_a_record_nests_as_the_calls_did(tree, failing):
    """Each call begins before and ends after those inside it; a call that raised is dropped, those inside it stay."""
    record = Record()
    record.begin(is_common=True)
    run(record, tree, failing)
    record.end(completed=True)
    assert "".join(map(spelled, record.passes)) == spelled_tree(tree, failing)


@given(calls)
def test_a_forward_that_raised_awaits_no_backward(tree):
    """Neither a forward that raised nor calls outside a recorded forward are awaited by a backward."""
    record = Record()
    record.begin(is_common=True)
    run(record, tree)
    record.end(completed=False)
    run(record, tree)
    assert record.passes == []


def test_calls_of_one_checkpoint_share_a_segment():
    """Calls of one checkpoint have the same number, neighbouring checkpoints different ones, other calls -1."""
    first, second = object(), object()
    record = Record()
    record.begin(is_common=True)
    for segment in (None, Segment(first), Segment(first), None, Segment(second)):
        record.enter("a", segment)
        record.leave(completed=True)
    record.end(completed=True)
    assert [bracket.segment for bracket in record] == [-1, 0, 0, -1, 1]


def test_a_record_holds_no_graph():
    """The node of a reentrant checkpoint is freed with its graph, and the call is then dead."""

    class Node:
        pass

    record, node = Record(), Node()
    record.begin(is_common=True)
    record.enter("a", Segment(node, node))
    record.leave(completed=True)
    record.end(completed=True)
    (bracket,) = record
    assert bracket.is_alive
    reference = weakref.ref(node)
    del node
    gc.collect()
    assert reference() is None
    assert not bracket.is_alive
