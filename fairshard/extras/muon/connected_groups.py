"""Errors that reach the ranks of all process groups that are connected by ranks in several of them.

Each group agrees on its errors by itself. A rank in two groups would raise for an error of one, and the ranks of the
other would wait for it. With groups (0, 1) and (0, 2), rank 0 passes an error on; longer chains need more rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from fairshard.errors import RanksDisagreeError
from fairshard.utils.agree import agree
from fairshard.utils.collectives import Communicator

Group = frozenset[int]
_Problem = tuple[bool, str]
"""Whether ranks disagree, and the text of an error."""


@dataclass
class _Known:
    """Groups that a rank has heard of, which of them stay in use, the ranks whose groups these are, and an error."""

    groups: set[tuple[Group, bool]] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    problem: _Problem | None = None

    def add(self, other: _Known) -> None:
        self.groups |= other.groups
        self.ranks |= other.ranks
        self.problem = self.problem or other.problem

    @property
    def is_complete(self) -> bool:
        return all(group <= self.ranks for group, _ in self.groups)


class ConnectedGroups:
    """The process groups of this rank, and those that other ranks of them are in.

    ``stays`` says for each of ``comms`` whether the steps after the first use it too.
    """

    def __init__(self, comms: Sequence[Communicator], stays: Sequence[bool]) -> None:
        used: dict[Communicator, bool] = {}
        for comm, one in zip(comms, stays, strict=True):
            used[comm] = used.get(comm, False) or one
        self._used = {comm: one for comm, one in used.items() if comm.peers}
        self._num_rounds: int | None = None

    @property
    def are_several(self) -> bool:
        """Whether this rank is in several groups."""
        return len(self._used) > 1

    def forget(self) -> None:
        """Find out again in the next `spread`; every rank of a group calls it, because one of them must."""
        self._used = {comm: stays for comm, stays in self._used.items() if stays}
        self._num_rounds = None

    @property
    def are_known(self) -> bool:
        """Whether `spread` has found out how the groups are connected."""
        return self._num_rounds is not None

    def spread(self, error: Exception | None, device: torch.device) -> Exception | None:
        """``error``, or an error of another rank. **Collective** over all connected groups: every rank calls it.

        The first call also finds out how many groups an error has to pass; that counts for all later ones.
        """
        if self._num_rounds is None:
            return self._explore(error)
        for _ in range(self._num_rounds):
            for comm, stays in self._used.items():
                if stays and not agree(comm, int(error is not None), device):
                    every: list[_Problem | None] = comm.gather_objects(_problem_of(error))
                    error = error or _error_of(next((problem for problem in every if problem), None))
        return error

    def _explore(self, error: Exception | None) -> Exception | None:
        known = _Known({(_ranks_of(comm), stays) for comm, stays in self._used.items()}, problem=_problem_of(error))
        known.ranks.add(dist.get_rank())
        num_rounds = 0
        # A rank that knows all groups knows how many rounds the last one needs to know them, and takes part in these.
        while not known.is_complete or num_rounds <= num_hops(group for group, _ in known.groups):
            for heard in [each for comm in self._used for each in comm.gather_objects(known)]:
                known.add(heard)
            num_rounds += 1
        self._num_rounds = num_hops(group for group, stays in known.groups if stays)
        return error or _error_of(known.problem)


def num_hops(groups: Iterable[Group]) -> int:
    """The most groups that a message from all ranks of one group passes until it has reached every connected rank."""
    every = set(groups)
    of_rank: dict[int, list[Group]] = {}
    for group in every:
        for rank in group:
            of_rank.setdefault(rank, []).append(group)
    most = 0
    for first in every:
        reached, passed, new, num = set(first), {first}, set(first), 0
        while new:
            hops = {group for rank in new for group in of_rank[rank]} - passed
            passed |= hops
            new = set[int]().union(*hops) - reached
            reached |= new
            num += bool(new)
        most = max(most, num)
    return most


def _ranks_of(comm: Communicator) -> Group:
    return frozenset(dist.get_process_group_ranks(comm.group))


def _problem_of(error: Exception | None) -> _Problem | None:
    return None if error is None else (isinstance(error, RanksDisagreeError), str(error))


def _error_of(problem: _Problem | None) -> Exception | None:
    if problem is None:
        return None
    disagree, text = problem
    message = f"Ranks of another process group failed, so all ranks raise: {text}"
    return RanksDisagreeError(message) if disagree else RuntimeError(message)
