"""The covering array covers, whatever the matrix."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.covering import all_cells, cells_for_pairs, covered, covering_array, leave_cells_to_full


@given(st.lists(st.integers(1, 5), min_size=2, max_size=6))
@settings(max_examples=25)
def test_every_pair_of_values_meets_in_a_cell(sizes):
    """For any two axes, every pair of their values appears together in at least one cell of the array."""
    axes = {f"axis{i}": [f"{i}.{j}" for j in range(size)] for i, size in enumerate(sizes)}
    met = set().union(*(covered(cell) for cell in covering_array(axes)))
    for one, other in itertools.combinations(axes, 2):
        for pair in itertools.product(axes[one], axes[other]):
            assert frozenset(zip((one, other), pair, strict=True)) in met


def test_the_array_is_small():
    """The array has at least as many cells as the two longest axes have pairs, and at most twice as many."""
    axes = {name: list(range(size)) for name, size in zip("abcdefgh", (2, 2, 4, 3, 3, 3, 3, 3), strict=True)}
    cells = covering_array(axes)
    assert 4 * 3 <= len(cells) <= 2 * 4 * 3
    assert len(all_cells(axes)) == math.prod(len(values) for values in axes.values())


def test_the_same_seed_gives_the_same_cells():
    """Cells are test ids: they must not change from run to run, nor from process to process."""
    axes = {"a": [0, 1], "b": [0, 1, 2], "c": [True, False]}
    assert covering_array(axes) == covering_array(axes)


@pytest.mark.parametrize("values", [[None, 2, math.inf], [0, 0.001, 25], ["x", "y"]])
def test_values_of_any_type_are_kept_as_they_are(values):
    """Cells hold the values of the axes unchanged."""
    cells = covering_array({"a": values, "b": [1, 2]})
    assert {id(cell["a"]) for cell in cells} == {id(value) for value in values}


@pytest.mark.parametrize("hole", [0, 1])
def test_chosen_cells_have_all_pairs_of_a_matrix(hole):
    """Of all cells few are chosen, in which every pair meets; a matrix with holes has only the pairs that it had."""
    cells = [cell for cell in all_cells({"a": "xyz", "b": [0, 1], "c": [2, 3], "d": [4, 5]}) if not hole or cell["b"]]
    chosen = [cells[position] for position in cells_for_pairs(cells)]
    assert set().union(*map(covered, chosen)) == set().union(*map(covered, cells))
    assert 6 <= len(chosen) < len(cells) / 2 + hole


class Item:
    """A collected test with the marks and parameters of ``cell``."""

    path, originalname = Path(__file__), "test_anything"

    def __init__(self, cell, *marks):
        self.callspec = SimpleNamespace(params=cell)
        self.marks = set(marks)

    def get_closest_marker(self, name):
        return name in self.marks

    def add_marker(self, mark):
        self.marks.add(mark.name)


def test_marked_tests_run_in_cells_with_all_pairs():
    """Cells of a test marked `pairs` that are needed for no pair become `full`; those that are `full` do not count."""
    cells = all_cells({"a": [0, 1], "b": ["x", "y"], "c": [None, object]})
    items = [Item(cell, "pairs") for cell in cells]
    full = [Item({**cell, "c": []}, "pairs", "full") for cell in cells]
    others = [Item(cell) for cell in cells]
    leave_cells_to_full([*items, *full, *others])
    kept = [item.callspec.params for item in items if "full" not in item.marks]
    assert set().union(*map(covered, kept)) == set().union(*map(covered, cells))
    assert len(kept) == 4
    assert all("full" in item.marks for item in full)
    assert not any(item.marks for item in others)
