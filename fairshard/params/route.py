"""The user's settings for the communication of one flat param."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fairshard.errors import FairshardError
from fairshard.utils.buckets import Division
from fairshard.utils.collectives import Communicator, UserGather
from fairshard.utils.streams import Stream


@dataclass
class Route:
    """Custom communication of one flat param.

    ``gather`` and ``scatter`` make the user's collectives from the engine's, which they replace; with
    ``uses_group_memory`` these are the engine's, in memory from the backend. ``hook`` is called with each mean, on
    ``hook_stream``. Without ``sums_replicas``, sums over the ranks of a shard are kept, and not summed over replicas
    yet. ``division``: the divisors of gradients; None: those that make means.
    """

    gather: UserGather | None = None
    scatter: Callable[[Communicator], Communicator] | None = None
    uses_group_memory: bool = False
    hook: Callable[[Tensor], object] | None = None
    hook_stream: Any = None
    sums_replicas: bool = True
    division: Division | None = None

    @torch.no_grad()
    def change(self, reduced: Tensor) -> None:
        """Call the user's hook with ``reduced``, a mean, which it changes in place."""
        assert self.hook is not None
        stream = Stream.of(None if reduced.is_cpu else self.hook_stream)
        with stream.in_turn(reduced.device):
            self.hook(reduced)

    def __deepcopy__(self, memo: dict[int, Any]) -> Route:
        return replace(self)

    def __getstate__(self) -> dict[str, Any]:
        if self.gather or self.scatter or self.hook:
            raise FairshardError(
                "A model with custom communication or an all-reduce hook must not be pickled, because the unpickled "
                "copy would lose it. Save its state_dict(), or use deepcopy, which keeps it."
            )
        return {"sums_replicas": self.sums_replicas, "division": self.division}
