"""The covering array covers, whatever the matrix."""

import itertools
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.covering import all_cells, cells_for_pairs, covered, covering_array

ROOT = Path(__file__).parents[1]


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


PARAMETRIZED = """
import pytest

@pytest.mark.pairs
@pytest.mark.parametrize("a", [0, 1])
@pytest.mark.parametrize("b", ["x", "y"])
@pytest.mark.parametrize("c", [None, pytest.param(1.0, marks=pytest.mark.full), object])
def test_in_pairs(a, b, c): ...

@pytest.mark.parametrize("a", [0, 1])
@pytest.mark.parametrize("b", ["x", "y"])
@pytest.mark.parametrize("c", [None, object])
def test_in_all_cells(a, b, c): ...
"""


def test_marked_tests_run_in_cells_with_all_pairs(tmp_path):
    """The mark `pairs` leaves the cells that are not needed for a pair to `full`; values that are `full` stay so."""
    (tmp_path / "test_parametrized.py").write_text(PARAMETRIZED)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-p", "tests.conftest"]
    for expression, num_in_pairs, num_in_all in (("not full", 4, 8), ("full or not full", 12, 8)):
        run = subprocess.run(
            [*command, "-m", expression, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert run.stdout.count("::test_in_pairs[") == num_in_pairs, run.stdout
        assert run.stdout.count("::test_in_all_cells[") == num_in_all, run.stdout
