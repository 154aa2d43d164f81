"""A few cells of a big matrix that together hold every pair of settings."""

import itertools
import random

import pytest


def all_cells(axes):
    """Every combination of the values of ``axes`` (``{name: values}``), as dictionaries."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def covering_array(axes, seed=0, num_candidates=30):
    """Cells of ``axes`` such that any two values of different axes meet in at least one of them.

    Greedy: each cell is the best of ``num_candidates`` that start from an uncovered pair and take, axis by
    axis in random order, the value that covers most. The same ``seed`` gives the same cells.

    Source: D. Cohen et al., "The AETG system", IEEE Transactions on Software Engineering 23(7), 1997.
    """
    rng = random.Random(seed)
    uncovered = {frozenset(pair) for pair in _pairs(axes)}
    cells = []
    while uncovered:
        start = min(uncovered, key=_sortable)
        candidates = [_candidate(axes, start, uncovered, rng) for _ in range(num_candidates)]
        best = max(candidates, key=lambda cell: len(covered(cell) & uncovered))
        uncovered -= covered(best)
        cells.append({name: axes[name][best[name]] for name in axes})
    return cells


def cells_for_pairs(cells):
    """Positions of some of ``cells``, of at least two axes, in which any two values meet that meet in any of them."""
    uncovered = set().union(*map(covered, cells))
    assert uncovered, "cells of one axis have no pairs"
    chosen = []
    while uncovered:
        best = max(range(len(cells)), key=lambda position: len(covered(cells[position]) & uncovered))
        uncovered -= covered(cells[best])
        chosen.append(best)
    return chosen


def leave_cells_to_full(items):
    """Of each test marked `pairs` in the collected ``items``, mark those cells `full` that are needed for no pair."""
    by_test = {}
    for item in items:
        if item.get_closest_marker("pairs") and not item.get_closest_marker("full"):
            by_test.setdefault((item.path, item.originalname), []).append(item)
    for cells in by_test.values():
        # The same value is the same object in all cells; it need not be hashable.
        kept = cells_for_pairs([{name: id(value) for name, value in item.callspec.params.items()} for item in cells])
        for position in set(range(len(cells))) - set(kept):
            cells[position].add_marker(pytest.mark.full)


def random_cells(axes, num_cells, seed=0):
    """``num_cells`` random cells, drawn with ``seed``, of a matrix too big to run in full."""
    rng = random.Random(seed)
    return [{name: rng.choice(values) for name, values in axes.items()} for _ in range(num_cells)]


def over_cells(cells):
    """Parametrize a test by ``world_size`` and by the rest of each of ``cells``, as ``cell``."""
    values = [(cell["world_size"], {k: v for k, v in cell.items() if k != "world_size"}) for cell in cells]
    ids = ["-".join(v if isinstance(v, str) else f"{k}={v}" for k, v in cell.items()) for cell in cells]
    return pytest.mark.parametrize(("world_size", "cell"), values, ids=ids)


def covered(cell):
    """The pairs of (axis, value) that meet in ``cell``."""
    return {frozenset(pair) for pair in itertools.combinations(cell.items(), 2)}


def _pairs(axes):
    for one, other in itertools.combinations(axes, 2):
        for i, j in itertools.product(range(len(axes[one])), range(len(axes[other]))):
            yield (one, i), (other, j)


def _candidate(axes, start, uncovered, rng):
    cell = dict(start)
    names = [name for name in axes if name not in cell]
    rng.shuffle(names)
    for name in names:
        scores = {}
        for index in range(len(axes[name])):
            new = {frozenset([(name, index), item]) for item in cell.items()}
            scores[index] = len(new & uncovered)
        best = max(scores.values())
        cell[name] = rng.choice([index for index, score in scores.items() if score == best])
    return cell


def _sortable(pair):
    return sorted(pair)
