"""A process group as a unit keeps it: shared by deepcopy, left behind by pickle, checked when found again."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from fairshard.utils.messages import default_group

MISSING = "MISSING"


class SavedGroup:
    """The group that a shard was cut for; ``group`` is None after unpickling, until it is set or needed."""

    def __init__(self, group: ProcessGroup | None, rank: int, world_size: int) -> None:
        self.group = group
        self.rank = rank
        self.world_size = world_size

    def resolve(self) -> ProcessGroup:
        """The group; after unpickling the one that was set, else the default one.

        Raises:
            ValueError: it has another size, or this process another rank in it, than the shard was cut for.
        """
        group = self.group or default_group()
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        if (rank, world_size) != (self.rank, self.world_size):
            raise ValueError(
                f"A pickled model must be used by the rank that its shards were cut for, which is {self.rank} of "
                f"{self.world_size}, but this is rank {rank} of {world_size}. Set `model.process_group`, or after "
                "fully_shard call `model.set_device_mesh(mesh)`; or save with state_dict() and load into a newly "
                "wrapped model."
            )
        self.group = group
        return group

    def __deepcopy__(self, memo: dict[int, Any]) -> SavedGroup:
        return SavedGroup(self.group, self.rank, self.world_size)

    def __reduce__(self) -> tuple[Any, ...]:
        return SavedGroup, (None, self.rank, self.world_size)
