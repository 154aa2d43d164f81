"""A tap on a method of one object sees each call, and leaves nothing behind."""

import itertools

import pytest

from fairshard.checks.method_tap import tap


class Adder:
    """An object with a method, and a second method that calls it."""

    def __init__(self, first):
        self.first = first

    def add(self, second):
        return self.first + second

    def add_twice(self, second):
        return self.add(self.add(second))


def test_calls_are_seen_inside_and_out_on_that_object_alone():
    """A tap sees arguments and result of each call and may change them; other objects are not affected."""
    seen = []

    def around(method, second):
        seen.append(second)
        return method(second) * 10

    watched, other = Adder(1), Adder(1)
    undo = tap(watched, "add", around)
    assert (watched.add_twice(2), other.add_twice(2)) == ((1 + 30) * 10, 4)
    undo()
    assert watched.add_twice(2) == 4
    assert seen == [2, 30]


@pytest.mark.parametrize("leaving", list(itertools.permutations(range(3))))
def test_taps_can_be_removed_in_any_order(leaving):
    """The last tap is called first; removing one twice does no harm."""
    seen = []
    watched = Adder(1)
    undo = [
        tap(watched, "add", lambda method, second, name=name: (seen.append(name), method(second))[1])
        for name in range(3)
    ]
    here = [0, 1, 2]
    for name in leaving:
        seen.clear()
        assert watched.add(1) == 2
        assert seen == here[::-1]
        undo[name]()
        undo[name]()
        here.remove(name)
    assert vars(watched) == {"first": 1}
