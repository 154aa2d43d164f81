"""Which calls of a pass a rank's backward reaches: rules over the record, tried without graphs."""

from types import SimpleNamespace

import pytest

from fairshard.engine.exchange import ASSUMED
from fairshard.engine.plan import Plan
from fairshard.engine.record import Pass, Sight
from fairshard.engine.schedule import CallPlace

pytestmark = pytest.mark.behaviour("answers")


class Unit:
    """Stands in for a unit; ``leaves``: for each parameter whether autograd reaches it."""

    nodes = ()

    def __init__(self, *leaves):
        self.leaves = bytes(leaves)


class Hooks:
    """Stands in for `CallHooks`."""

    def __init__(self, is_reached, makes_graphs=False):
        self.is_reached = lambda by_inputs: is_reached
        self.makes_graphs = lambda: makes_graphs


def record(*script):
    """A pass; ``script``: ``(unit, segment)`` where a call begins, None where the innermost ends."""
    one = Pass()
    for step in script:
        if step is None:
            one.leave()
        else:
            one.enter(*step)
    for index, call in enumerate(one.calls):
        call.index = index
    return one.calls


def show(call, reached, makes_graphs=False):
    """The call has hooks, which autograd has ``reached``."""
    call.sight = Sight.HOOKS
    hooks = Hooks(reached, makes_graphs)
    call.hooks = lambda: hooks


def ask(calls):
    """What a plan of ``calls`` answers: each call, each leaf, the checkpoints to run again, and the flags."""
    units = list(dict.fromkeys(call.unit for call in calls))
    answers, leaves = bytearray(), []
    for unit in units:
        part = slice(len(answers), len(answers) + len(unit.leaves))
        answers += unit.leaves
        flat_param = SimpleNamespace(line=SimpleNamespace(numel=len(unit.leaves)), nodes=[object()] * len(unit.leaves))
        leaves.append((unit, flat_param, part))
    plan = SimpleNamespace(
        own=bytearray(len(calls)),
        calls=calls,
        known=SimpleNamespace(places=[CallPlace(units.index(call.unit), 0, call.segment) for call in calls]),
        segments=set(),
        unseen=set(),
        leaves=leaves,
        answers=answers,
    )
    flags = Plan._answer(plan, is_restricted=False)
    return list(plan.own), bytes(answers), plan.segments, flags


OUTER, FIRST, SECOND = Unit(1), Unit(1), Unit(1)
NESTED = (OUTER,), (FIRST,), None, (SECOND,), None, None


@pytest.mark.parametrize(
    ("reached", "expected"),
    [((1, 1, 1), [1, 1, 1]), ((1, 0, 1), [1, 0, 1]), ((0, 0, 1), [1, 0, 1]), ((0, 0, 0), [0, 0, 0])],
)
def test_a_call_around_a_reached_one_is_reached(reached, expected):
    """A call inside is not, if its own hooks say so: the outer one computes without it."""
    calls = record(*NESTED)
    for call, one in zip(calls, reached, strict=True):
        show(call, one)
    assert ask(calls) == (expected, b"\1\1\1", set(), 0)


def test_a_call_around_a_reached_one_is_reached_at_any_depth():
    """The innermost of three shows both around it."""
    calls = record((OUTER,), (FIRST,), (SECOND,), None, None, None)
    show(calls[2], True)
    assert ask(calls)[0] == [1, 1, 1]


def test_calls_without_a_graph_are_not_reached():
    """A frozen tower inside of a reached call stays out of the list."""
    calls = record(*NESTED)
    show(calls[0], True)
    assert ask(calls)[0] == [1, 0, 0]


@pytest.mark.parametrize("around", [True, False])
def test_a_call_that_cannot_be_seen_counts_as_the_one_around_it(around):
    """Inside a checkpoint whose graph does not exist yet."""
    calls = record((OUTER,), (FIRST, 7), None, None)
    show(calls[0], around)
    calls[1].sight = Sight.LATER
    assert ask(calls)[::2] == ([around, around], {7} if around else set())


def test_all_calls_of_a_checkpoint_run_again():
    """One reached call of a segment brings the others, those of another segment stay out."""
    calls = record((FIRST, 3), None, (SECOND, 3), None, (OUTER, 4), None)
    show(calls[1], True)
    for call in (calls[0], calls[2]):
        show(call, False)
    assert ask(calls)[::2] == ([1, 1, 0], {3})


@pytest.mark.parametrize("sight", [Sight.HOOKS, Sight.LATER])
def test_leaves_behind_a_graph_that_does_not_exist_yet_are_assumed(sight):
    """Only of units that have a leaf for which autograd knows no path."""
    unsure, sure = Unit(1, 0), Unit(1, 1)
    calls = record((OUTER,), (unsure, 2), None, (sure, 2), None, None)
    for call in calls:
        show(call, True, makes_graphs=call.unit is not OUTER)
        if call.unit is not OUTER and sight is Sight.LATER:
            call.sight, call.hooks = sight, None
    assert ask(calls) == ([1, 1, 1], b"\1\1\1\1\1", {2}, ASSUMED)
    show(calls[1], True)
    assert ask(calls[:2])[1:] == (b"\1\1\0", {2}, 0)
