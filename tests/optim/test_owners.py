"""Jobs are balanced over ranks, by integers alone."""

import itertools
import random

import pytest

from fairshard.optim.owners import owners_of


def loads_of(costs, owners, num_ranks):
    return [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(num_ranks)]


def cases(num_cases, num_jobs, seed=0):
    """Random costs and parts, of which no rank holds all."""
    draw = random.Random(seed)
    for _ in range(num_cases):
        num_ranks = draw.randint(2, 4)
        costs = [draw.choice([draw.randint(1, 9), draw.randint(1, 1000)]) for _ in range(draw.randint(1, num_jobs))]
        held = [[draw.randint(1, 5) for _ in range(num_ranks)] for _ in costs]
        yield costs, held, num_ranks


def test_longest_first_is_within_four_thirds_of_the_best():
    """With up to seven jobs, compared with every assignment: at most 4/3 - 1/(3 W) of the smallest largest load."""
    for costs, held, num_ranks in cases(60, num_jobs=7):
        largest = max(loads_of(costs, owners_of(costs, held, num_ranks), num_ranks))
        every = itertools.product(range(num_ranks), repeat=len(costs))
        best = min(max(loads_of(costs, owners, num_ranks)) for owners in every)
        assert 3 * num_ranks * largest <= (4 * num_ranks - 1) * best


def test_many_jobs_are_nearly_equal():
    """The largest load is at most the mean plus the longest job, which no rule could split."""
    for costs, held, num_ranks in cases(100, num_jobs=60, seed=1):
        owners = owners_of(costs, held, num_ranks)
        assert set(owners) <= set(range(num_ranks))
        assert num_ranks * max(loads_of(costs, owners, num_ranks)) <= sum(costs) + num_ranks * max(costs)


def test_a_rank_that_holds_all_of_a_job_does_it_and_gets_less_of_the_rest():
    """Whole inputs are never sent, and count as work of their rank."""
    held = [[4, 0, 0], [4, 0, 0], [1, 2, 1], [2, 1, 1], [0, 0, 0]]
    owners = owners_of([5, 5, 6, 4, 0], held, 3)
    assert owners[:2] == [0, 0]
    assert sorted(owners[2:4]) == [1, 2]


def test_equal_loads_go_to_the_rank_that_holds_most():
    """Among ranks with equal loads the one with most of the input sends the least."""
    assert owners_of([3], [[1, 5, 2]], 3) == [1]
    assert owners_of([3, 2], [[1, 5, 2], [2, 1, 2]], 3) == [1, 0]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_no_jobs(num_ranks):
    """Nothing to do is done by nobody."""
    assert owners_of([], [], num_ranks) == []
