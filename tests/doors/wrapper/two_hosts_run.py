"""The program of each rank of ``test_two_hosts.py``, started by torchrun: ``two_hosts_run.py OUT``."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from fairshard.nn import ShardingStrategy
from tests.models import tiny, tiny_batch, tiny_loss, wrap_tiny
from tests.reference import train_alike


def loss_of(model, step):
    *inputs, targets = tiny_batch(dist.get_rank(), step)
    return tiny_loss(model(*inputs), targets)


def train(strategy):
    """Train three steps as a plain replica, up to rounding of nested sums; return the size of this rank's shards."""
    wrapped = train_alike(
        tiny(), lambda model: wrap_tiny(model, sharding_strategy=strategy), loss_of, rtol=1e-5, atol=1e-6
    )
    return sum(shard.numel() for shard in wrapped.parameters())


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sizes = [train(strategy) for strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.FULL_SHARD)]
    network = os.stat("/proc/self/ns/net").st_ino
    Path(folder, str(dist.get_rank())).write_text(f"{network} {os.environ['GROUP_RANK']} {sizes[0]} {sizes[1]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
