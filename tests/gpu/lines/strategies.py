"""Lines about replicas: hybrid strategies and NO_SHARD."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import ShardingStrategy
from tests.gpu.check import Missed, on_ranks
from tests.gpu.delays import REDUCE, late, must_not_wait
from tests.gpu.training import Net, Way, batches, digest, own_part, same_when_late
from tests.kit import rank_device


@on_ranks("replica-reduce", 4)
def replica_reduce(is_small):
    """The all-reduce over replicas follows its reduce-scatter on the reduce stream; the host does not wait."""
    mesh = init_device_mesh(rank_device().type, (2, dist.get_world_size() // 2))
    digests = []
    for slow in (False, True):
        with late(REDUCE) if slow else torch.enable_grad():
            torch.manual_seed(0)
            net = Net().to(rank_device())
            options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
            for index, block in enumerate(net.blocks):
                net.blocks[index] = FSDP(block, **options)
            model = FSDP(net, **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
            for step, each in enumerate(batches(3)):
                loss = model(each).square().mean()
                must_not_wait(loss.backward) if step else loss.backward()  # the first one builds communicators
                optimizer.step()
                optimizer.zero_grad()
            digests.append(digest(own_part(param) for param in model.parameters()))
    if digests[0] != digests[1]:
        raise Missed("a late reduce stream changes weights", {})
    return {}


@on_ranks("no-shard-clone", 2)
def no_shard_clone(is_small):
    """With NO_SHARD gradients are the mean over ranks, though the backend reduces in place, and late."""
    figures = same_when_late(REDUCE, Way(strategy="NO_SHARD"), Way(strategy="NO_SHARD", low=torch.bfloat16))
    layer = nn.Linear(8, 8, bias=False).to(rank_device())
    model = FSDP(layer, sharding_strategy=ShardingStrategy.NO_SHARD)
    for _ in range(2):  # the second backward uses the bucket's memory again
        model.zero_grad()
        model(torch.full((1, 8), 1.0 + dist.get_rank(), device=rank_device())).sum().backward()
        mean = (1 + dist.get_world_size()) / 2
        if not bool((model.params[0].grad == mean).all()):
            raise Missed(f"the mean gradient must be {mean}", {})
    return figures
