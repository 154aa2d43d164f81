"""The user's settings for the communication of one flat param."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fairshard.errors import FairshardError
from fairshard.utils.buckets import Division
from fairshard.utils.collectives import Communicator, UserGather


@dataclass
class Route:
    """Custom communication of one flat param.

    ``gather`` and ``scatter`` make the user's collectives from the engine's, which they replace. ``hook`` changes each
    mean in place. Without ``sums_replicas``, sums over the ranks of a shard are kept, and not summed over replicas yet.
    ``division``: the divisors of gradients; None: those that make means.
    """

    gather: UserGather | None = None
    scatter: Callable[[Communicator], Communicator] | None = None
    hook: Callable[[Tensor], object] | None = None
    sums_replicas: bool = True
    division: Division | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Route:
        return replace(self)

    def __getstate__(self) -> dict[str, Any]:
        if self.gather or self.scatter or self.hook:
            raise FairshardError(
                "A model with custom communication or an all-reduce hook must not be pickled, because the unpickled "
                "copy would lose it. Save its state_dict(), or use deepcopy, which keeps it."
            )
        return {"sums_replicas": self.sums_replicas, "division": self.division}
