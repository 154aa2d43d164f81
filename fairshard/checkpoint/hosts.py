"""Hosts of a run: which ranks share memory, and which rank keeps a copy of whose file.

Each host keeps copies for the one before it, in a ring. With 3 hosts of 2 ranks, ``a -> b`` means that rank ``b`` keeps
a copy of the file of rank ``a``::

    host 0    0 -> 2    1 -> 3
    host 1    2 -> 4    3 -> 5
    host 2    4 -> 0    5 -> 1

*Invariant*: after any one host is lost, the others hold the files of all ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Hosts:
    """The ranks of each host, ascending; hosts are ordered by their lowest ranks."""

    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, places: Sequence[Hashable]) -> Hosts:
        """Hosts of the ranks whose ``places``, by rank, are equal."""
        found: dict[Hashable, list[int]] = {}
        for rank, place in enumerate(places):
            found.setdefault(place, []).append(rank)
        return cls(tuple(map(tuple, found.values())))

    def host_of(self, rank: int) -> int:
        """Index of the host of ``rank``."""
        return next(host for host, ranks in enumerate(self.ranks) if rank in ranks)

    def beside(self, rank: int) -> tuple[int, ...]:
        """All ranks of the host of ``rank``."""
        return self.ranks[self.host_of(rank)]

    def leads(self, rank: int) -> bool:
        """Whether ``rank`` is the lowest of its host."""
        return self.beside(rank)[0] == rank

    def keeper_of(self, rank: int) -> int | None:
        """The rank of the next host that keeps a copy of the file of ``rank``; None with one host."""
        if len(self.ranks) == 1:
            return None
        host = self.host_of(rank)
        others = self.ranks[(host + 1) % len(self.ranks)]
        return others[self.ranks[host].index(rank) % len(others)]

    def kept_by(self, rank: int) -> tuple[int, ...]:
        """The ranks for which ``rank`` keeps a copy."""
        before = self.ranks[self.host_of(rank) - 1]
        return tuple(other for other in before if self.keeper_of(other) == rank)
