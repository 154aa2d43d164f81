"""Which rank owns which whole tensor, so that all ranks own about as much. Imports nothing, knows no tensors."""

from __future__ import annotations

from collections.abc import Sequence


def balanced_owners(
    numels: Sequence[int], world_size: int, given: Sequence[int | None] | None = None, loads: list[int] | None = None
) -> list[int]:
    """The rank that owns each of the tensors of ``numels`` elements; ``given`` ranks (None: choose) are kept.

    Longest first: the largest tensor left goes to the rank that owns least. Without ``given`` ranks the largest rank
    owns at most 4/3 of what it would if the tensors were shared out best. Equal on all ranks.

    ``loads`` is what each rank owns before, and is updated: parts of a model may follow each other. The difference
    between any two ranks then stays below the largest tensor, unless ``given`` ranks have made it larger.

    Source: Graham, "Bounds on multiprocessing timing anomalies", 1969.
    """
    owners = [None] * len(numels) if given is None else list(given)
    loads = [0] * world_size if loads is None else loads
    for numel, owner in zip(numels, owners, strict=True):
        if owner is not None:
            loads[owner] += numel
    found = [0 if owner is None else owner for owner in owners]
    free = [index for index, owner in enumerate(owners) if owner is None]
    for index in sorted(free, key=lambda index: (-numels[index], index)):
        found[index] = loads.index(min(loads))
        loads[found[index]] += numels[index]
    return found
