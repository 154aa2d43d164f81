"""The residency table is arithmetic: each row of it can be read from the function."""

import inspect
import itertools

import pytest

from fairshard.engine.residency import Action, Event, Keeps, State, action, table

pytestmark = pytest.mark.behaviour("residency")

HERE = (State.GATHERING, State.WHOLE)
FACTS = [name for name, param in inspect.signature(action).parameters.items() if param.kind is param.KEYWORD_ONLY]


def frees(event, state=State.WHOLE, keeps=None, **now):
    return action(state, event, keeps or Keeps(), **now) is Action.FREE


@pytest.mark.parametrize("event", Event)
def test_what_is_sharded_is_never_freed_and_what_is_here_gathered_only_if_stale(event):
    """For every rule and every fact."""
    bools = (False, True)
    for keeps in itertools.starmap(Keeps, itertools.product(bools, repeat=3)):
        for values in itertools.product(*[bools] * len(FACTS)):
            now = dict(zip(FACTS, values, strict=True))
            assert action(State.SHARDED, event, keeps, **now) is not Action.FREE
            for state in HERE:
                if action(state, event, keeps, **now) is Action.GATHER:
                    assert event is Event.ENTER
                    assert now["stale"]


def test_a_call_gathers_what_is_sharded_or_stale():
    """What was gathered for an earlier call is used again, in any case while that one computes with it."""
    assert action(State.SHARDED, Event.ENTER, Keeps()) is Action.GATHER
    for state in HERE:
        assert action(state, Event.ENTER, Keeps()) is Action.NOTHING
        assert action(state, Event.ENTER, Keeps(), stale=True) is Action.GATHER
        assert action(state, Event.ENTER, Keeps(), stale=True, open_calls=1) is Action.NOTHING


def test_a_call_that_ends_frees():
    """Unless the rule, another call, the user or the backward that comes next wants the unit."""
    assert frees(Event.LEAVE)
    assert not frees(Event.LEAVE, keeps=Keeps(reshard_after_forward=False))
    assert not frees(Event.LEAVE, hidden=True)
    assert frees(Event.LEAVE, hidden=True, recorded=False)
    assert not frees(Event.LEAVE, open_calls=1)


def test_what_a_pass_leaves():
    """What was gathered ahead and not called is freed; everything if no backward follows. What the user wants stays."""
    assert frees(Event.PASS_ENDS, State.GATHERING)
    assert not frees(Event.PASS_ENDS, State.GATHERING, pinned=True)
    assert not frees(Event.PASS_ENDS)
    assert frees(Event.PASS_ENDS, recorded=False)
    assert not frees(Event.PASS_ENDS, recorded=False, pinned=True)


def test_what_a_pass_takes_over():
    """Only what the keeps or the user keeps, as long as no shard was written to."""
    assert frees(Event.PASS_BEGINS)
    for kept in ({"keeps": Keeps(keeps_across_passes=True)}, {"pinned": True}):
        assert not frees(Event.PASS_BEGINS, **kept)
        assert frees(Event.PASS_BEGINS, stale=True, **kept)


@pytest.mark.parametrize(
    ("event", "keeps"),
    [(Event.UNNEEDED, ("hidden", "open_calls")), (Event.BACKWARD_ENDS, ("pinned", "hidden", "open_calls"))],
)
def test_a_backward_frees(event, keeps):
    """Unless the keeps or a call around the backward wants the unit, or, at its end, the user."""
    assert frees(event)
    assert not frees(event, keeps=Keeps(reshard_after_backward=False))
    assert not any(frees(event, **{name: 1}) for name in keeps)


@pytest.mark.parametrize("event", [Event.RESHARD, Event.INTERRUPTED])
def test_the_user_and_exceptions_free_in_any_case(event):
    """Whatever the rule is."""
    assert frees(event, keeps=Keeps(False, False, True), pinned=True, hidden=True, open_calls=1)


def test_the_table_has_a_row_for_each_event():
    """It is what the docs show."""
    rows = table().splitlines()
    assert [row.split()[0] for row in rows[1:]] == [event.name for event in Event]
    assert rows[0].split() == [state.name for state in State]
