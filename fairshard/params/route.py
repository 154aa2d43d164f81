"""The user's settings for the communication of one flat param."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fairshard.errors import FairshardError
from fairshard.params.kept_sum import KeptSum
from fairshard.utils.collectives import Communicator, Communicators, UserGather
from fairshard.utils.streams import Stream


@dataclass
class Route:
    """Custom communication of one flat param, and its sum that is not summed over replicas yet.

    ``gather`` and ``scatter`` make the user's collectives from the engine's, which they replace; with
    ``uses_group_memory`` these are the engine's, in memory from the backend. ``hook`` is called with each mean, on
    ``hook_stream``. Without ``sums_replicas``, sums over the ranks of a shard are kept, and not summed over replicas
    yet.

    Attributes:
        keeps_sums: whether sums wait now; False without replicas.
        kept: the waiting sum.
    """

    gather: UserGather | None = None
    scatter: Callable[[Communicator], Communicator] | None = None
    uses_group_memory: bool = False
    hook: Callable[[Tensor], object] | None = None
    hook_stream: Any = None
    sums_replicas: bool = True

    def __post_init__(self) -> None:
        self._comms: Communicators | None = None
        self.kept = KeptSum()
        self.keeps_sums = False

    def start_from(self, comms: Communicators) -> None:
        """Use ``comms``, which all units over the same ranks share."""
        self._comms = comms

    def reduce_in(self, reduce: Communicator) -> bool:
        """Reduce in the group ``reduce``, which has the ranks of the shard; returns False before the first forward."""
        if self._comms is None:
            return False
        self._comms = replace(self._comms, reduce=reduce)
        return True

    def follow(self) -> Communicators | None:
        """The groups that the current settings require; None before the first forward."""
        comms = self._comms
        self.keeps_sums = not self.sums_replicas and comms is not None and comms.replicas is not None
        if comms is None:
            return None
        if self.scatter is not None:
            comms = replace(comms, reduce=self.scatter(comms.reduce))
        return replace(comms, replicas=None) if self.keeps_sums else comms

    @torch.no_grad()
    def change(self, reduced: Tensor) -> None:
        """Call the user's hook with ``reduced``, a mean, which it changes in place."""
        assert self.hook is not None
        stream = Stream.of(None if reduced.is_cpu else self.hook_stream)
        with stream.in_turn(reduced.device):
            self.hook(reduced)

    @property
    def has_waiting(self) -> bool:
        """Whether the running backward must add a waiting sum."""
        return self.kept.waiting is not None and not self.keeps_sums

    def __deepcopy__(self, memo: dict[int, Any]) -> Route:
        return replace(self)

    def __getstate__(self) -> dict[str, Any]:
        if self.gather or self.scatter or self.hook:
            raise FairshardError(
                "A model with custom communication or an all-reduce hook must not be pickled, because the unpickled "
                "copy would lose it. Save its state_dict(), or use deepcopy, which keeps it."
            )
        return {"sums_replicas": self.sums_replicas}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()
