"""Which rank computes what: jobs balanced over ranks. Imports nothing, knows no tensors."""

from __future__ import annotations

from collections.abc import Sequence


def owners_of(costs: Sequence[int], held: Sequence[Sequence[int]], num_ranks: int) -> list[int]:
    """The rank that does each job, so that the largest sum of a rank's costs is small.

    ``held[job][rank]`` is how much of the input of ``job`` is on ``rank``. A rank that holds all of it does the job,
    and nothing is sent. All other jobs are given out longest first, each to the rank with the least to do; of several
    such ranks to the one that holds most of its input, then to the first. Equal on all ranks, because it depends on
    the arguments only.

    Without jobs that one rank holds whole, the largest sum is at most ``4/3 - 1/(3 * num_ranks)`` of the smallest
    possible one.

    Source: R. L. Graham, "Bounds on Multiprocessing Timing Anomalies" (1969), longest processing time first.
    """
    owners = [-1] * len(costs)
    loads = [0] * num_ranks
    for job, parts in enumerate(held):
        holders = [rank for rank, numel in enumerate(parts) if numel]
        if len(holders) <= 1:
            owners[job] = holders[0] if holders else 0
            loads[owners[job]] += costs[job]
    waiting = [job for job, owner in enumerate(owners) if owner < 0]
    for job in sorted(waiting, key=lambda job: -costs[job]):
        parts = held[job]
        owner = min(range(num_ranks), key=lambda rank: (loads[rank], -parts[rank]))
        owners[job] = owner
        loads[owner] += costs[job]
    return owners
