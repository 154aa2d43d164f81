"""Models that are hard to shard and to name, sharded in place and trained briefly, for tests of their state."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fairshard.engine.tree import units_below
from fairshard.nn import Owned, RowBlocks, fully_shard
from tests.kit import rank_device
from tests.reference import average_grads_, randn
from tests.trained import odd


def by_columns(param):
    """Shard along the second dimension if it divides evenly."""
    is_even = param.dim() == 2 and param.shape[1] % dist.get_world_size() == 0
    return Shard(1) if is_even else None


def shard_odd(model, **kwargs):
    """Shard as a unit inside a unit."""
    fully_shard(model.frozen, **kwargs)
    return fully_shard(model, **kwargs)


SHARDED = {
    "rows": shard_odd,
    "columns": lambda model: shard_odd(model, shard_placement_fn=by_columns),
    "whole": fully_shard,
    "owned": lambda model: shard_odd(model, shard_placement_fn=lambda param: Owned()),
    "blocks": lambda model: shard_odd(model, shard_placement_fn=lambda param: RowBlocks(2)),
}


def sharded_odd(how="rows", seed=1):
    """An `Odd` sharded by ``SHARDED[how]``."""
    return SHARDED[how](odd(seed=seed))


def hybrid_mesh():
    """A mesh of two replicas."""
    return init_device_mesh(rank_device().type, (2, dist.get_world_size() // 2))


def train_odd(model, optimizer, steps):
    """Train on this rank's batches of ``steps``; average the gradients of a plain model over ranks."""
    is_plain = not units_below(model)
    for step in steps:
        model(randn(2, 3, key=step)).tanh().square().sum().backward()
        if is_plain:
            average_grads_(model.parameters())
        optimizer.step()
        optimizer.zero_grad()


def whole_of(values):
    """``values`` with each DTensor replaced by its full tensor. **Collective.**"""
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in values.items()}


def copied(values):
    """``values`` with each tensor cloned."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
