"""DistributedDataParallel around a module that is already sharded: refused by name when a pass begins."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fairshard.engine.tree import units_below
from fairshard.engine.unit import Unit


def refuse_ddp(called: Unit) -> None:
    """Raise if ``called`` is inside a DistributedDataParallel, now in its forward, over ranks that share a unit.

    Raises:
        ValueError: it would average different parts of the parameters.
    """
    ddp: Any = getattr(DistributedDataParallel, "_active_ddp_module", None)
    units = [] if ddp is None else [unit for _, unit in units_below(ddp.module)]
    if called not in units:
        return
    ranks = set(dist.get_process_group_ranks(ddp.process_group))
    for unit in units:
        group = unit.groups.shard.group
        shared = [] if group is None else sorted(ranks.intersection(dist.get_process_group_ranks(group)))
        if len(shared) > 1:
            raise ValueError(
                "DistributedDataParallel must be given other ranks than those that a unit is sharded over, but unit "
                f"`{unit.fqn or 'root'}` is sharded over its ranks {shared}: it averages different parts of the "
                "parameters. Leave DistributedDataParallel out, because gradients of shards are averaged already. For "
                "replicas of a sharded model, use hybrid sharding."
            )
