"""The recorded order is a hint: right when passes repeat, harmless when they do not."""

from hypothesis import given
from hypothesis import strategies as st

from fairshard.engine.exec_order import ExecOrder

passes = st.lists(st.sampled_from("abcd"), max_size=8)


def forward(order, units, backward_follows=True, exits=None):
    """One forward over ``units``, which end in the order of ``exits``; returns what each entry said comes next."""
    order.begin_forward()
    ahead = [order.enter(unit) for unit in units]
    order.exited.extend(exits or units)
    order.end_forward(backward_follows)
    return ahead


@given(passes)
def test_a_repeated_pass_is_foreseen(units):
    """The second time, each unit but the last is told its successor."""
    order = ExecOrder()
    assert forward(order, units) == [None] * len(units)
    assert forward(order, units) == [*units[1:], None][: len(units)]


@given(passes, passes)
def test_another_pass_gives_hints_from_the_last_one_only(first, second):
    """Whatever is said to come next did follow that unit, at that place, in the last pass."""
    order = ExecOrder()
    forward(order, first)
    for position, ahead in enumerate(forward(order, second)):
        if ahead is not None:
            assert first[position] == second[position]
            assert first[position + 1] == ahead


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=6, unique=True))
def test_a_backward_runs_the_other_way(units):
    """Going back through the units of one forward, each is told the one called before it."""
    order = ExecOrder()
    forward(order, units)
    assert list(order.begin_backward()) == units[::-1]
    assert [order.reenter(unit) for unit in units[::-1]] == [*units[:-1][::-1], None]


@given(passes)
def test_a_forward_without_grad_leaves_no_backward(units):
    """What runs without grad is not waited for."""
    order = ExecOrder()
    forward(order, units, backward_follows=False)
    assert list(order.begin_backward()) == []


@given(passes, st.sampled_from("abcdx"))
def test_an_unknown_unit_is_no_error(units, stranger):
    """A unit that was not expected gets no hint, or one of those that wait; it never raises."""
    order = ExecOrder()
    forward(order, units)
    order.begin_backward()
    assert order.reenter(stranger) in {None, *units}
    order.end_backward()
    assert list(order.begin_backward()) == []


def test_an_enclosing_unit_does_not_end_the_look_ahead():
    """An outer unit whose output is that of an inner one comes right after it in the backward: hints go on."""
    order = ExecOrder()
    forward(order, ["root", "a", "b", "c"], exits=["a", "b", "c", "root"])
    order.begin_backward()
    hints = {unit: order.reenter(unit) for unit in ["c", "root", "b", "a"]}
    assert hints == {"c": "b", "root": "b", "b": "a", "a": None}


def test_a_backward_comes_to_outer_units_first_and_is_through_with_them_last():
    """What comes next goes by where calls ended; gradients, which are planned, are complete where calls began."""
    order = ExecOrder()
    forward(order, ["root", "a", "a.w", "b", "b.w"], exits=["a.w", "a", "b.w", "b", "root"])
    assert list(order.begin_backward()) == ["b.w", "b", "a.w", "a", "root"]
    backward = ["root", "b", "b.w", "a", "a.w"]
    assert [order.reenter(unit) for unit in backward] == [*backward[1:], None]


def test_a_call_that_raised_is_not_expected():
    """It began and has not ended, so that no backward comes to it."""
    order = ExecOrder()
    forward(order, ["root", "a", "b"], exits=["b", "root"])
    assert order.begin_backward() == {"b": 1, "root": 1}


def test_several_forwards_are_gone_through_one_after_the_other():
    """The later one comes first; its first unit is followed by the last of the earlier one."""
    order = ExecOrder()
    forward(order, ["a", "b"])
    assert not order.is_later
    forward(order, ["a", "b"])
    assert order.is_later
    assert order.begin_backward() == {"b": 2, "a": 2}
    assert [order.reenter(unit) for unit in ["b", "a", "b", "a"]] == ["a", "b", "a", None]
    order.end_backward()
    forward(order, ["a", "b"])
    assert not order.is_later


def test_a_unit_is_come_to_again_once_its_calls_in_a_forward_are_through():
    """Called twice in each of two forwards: not between the two of one, nor in the end."""
    order = ExecOrder()
    for _ in range(2):
        forward(order, ["a", "b", "a"])
    order.begin_backward()
    assert not order.comes_again("a")
    seen = []
    for unit in ["a", "b", "a", "a", "b", "a"]:
        order.reenter(unit)
        seen.append(order.comes_again(unit))
    assert seen == [False, True, True, False, False, False]


def test_a_unit_is_not_foreseen_by_itself():
    """Called twice in a row, it looks past its own call."""
    order = ExecOrder()
    forward(order, ["a", "b", "b"])
    order.begin_backward()
    assert [order.reenter(unit) for unit in ["b", "b", "a"]] == ["a", "a", None]


def test_after_a_backward_that_is_not_the_last_the_rest_is_expected():
    """Its forward is foreseen as before, as often as its calls have not been come to."""
    order = ExecOrder()
    forward(order, ["a", "b", "c"])
    order.begin_backward()
    assert [order.reenter(unit) for unit in ["c", "a"]] == ["b", None]
    order.end_backward(is_last=False)
    assert order.begin_backward() == {"b": 1}
    assert [order.reenter(unit) for unit in ["b", "a"]] == ["a", None]
    order.end_backward()
    assert order.begin_backward() == {}


def test_a_forward_that_the_backward_is_through_with_is_forgotten():
    """Be it the last backward or not; an earlier forward goes on waiting."""
    order = ExecOrder()
    forward(order, ["a", "b"])
    forward(order, ["a", "b", "c"])
    order.begin_backward()
    for unit in ["c", "b", "a"]:
        order.reenter(unit)
    order.end_backward(is_last=False)
    assert order.begin_backward() == {"b": 1, "a": 1}
    assert [order.reenter(unit) for unit in ["b", "a"]] == ["a", None]
    order.end_backward(is_last=False)
    assert order.begin_backward() == {}


def test_what_is_ahead_is_so_until_the_backward_comes_to_it():
    """A hint is asked for again after a unit's gradients; by then the backward may have come further."""
    order = ExecOrder()
    forward(order, ["a", "b", "c"])
    order.begin_backward()
    order.reenter("c")
    assert order.still_ahead("c") == "b"
    assert order.still_ahead("b") is None
    order.reenter("b")
    assert order.still_ahead("c") is None
    assert order.still_ahead("b") == "a"
    order.end_backward()
    assert order.still_ahead("b") is None
