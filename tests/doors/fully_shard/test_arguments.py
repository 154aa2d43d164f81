"""Arguments that `fully_shard` accepts; what it refuses is in ``tests/doors/test_mistakes.py``."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fairshard.nn import CPUOffloadPolicy, DataParallelMeshDims, FSDPModule, MixedPrecisionPolicy, fully_shard
from tests.kit.doors import gathered
from tests.models import mlp
from tests.on_ranks import on_ranks
from tests.reference import randn

pytestmark = pytest.mark.behaviour("arguments of fully_shard")


@on_ranks(2)
def test_what_is_returned_and_accepted():
    """`fully_shard` returns its argument, and accepts the policies of both libraries and a bucket cap of 0."""
    model = mlp(4, 6, 4)
    pair = [model[0], model[2]]
    assert fully_shard(pair) is pair
    assert fully_shard(model) is model
    assert isinstance(model, FSDPModule)
    assert isinstance(model, nn.Sequential)
    assert [type(part).__name__ for part in model] == ["FSDPLinear", "Tanh", "FSDPLinear"]
    for policy in (MixedPrecisionPolicy(torch.bfloat16), torch_fsdp.MixedPrecisionPolicy(torch.bfloat16)):
        for offload in (CPUOffloadPolicy(), torch_fsdp.CPUOffloadPolicy(pin_memory=False), torch_fsdp.OffloadPolicy()):
            model = fully_shard(mlp(4, 6, 4), mp_policy=policy, offload_policy=offload, bucket_cap_mb=0)
            assert model(randn(2, 4)).dtype is torch.bfloat16
    model = fully_shard(mlp(4, 6, 8), shard_placement_fn=lambda p: Shard(-1) if p.dim() > 1 else None)
    assert model[0].weight.placements == (Shard(1),)
    assert model[0].bias.placements == (Shard(0),)
    model(randn(2, 4)).sum().backward()
    with pytest.warns(UserWarning, match="reshard_after_forward=1"):
        model = fully_shard(mlp(4, 6, 4), reshard_after_forward=1)
    model(randn(2, 4))
    assert gathered(model) == [""]
    model = fully_shard(nn.Sequential(fully_shard(mlp(4, 6, 4), reshard_after_forward=2)))
    model(randn(2, 4))
    assert gathered(model) == []


@on_ranks(2)
def test_ignored_params():
    """Ignored parameters stay plain, whole tensors with each rank's own gradient."""
    model = mlp(4, 6, 4)
    plain = copy.deepcopy(model)
    fully_shard(model, ignored_params={model[0].weight, nn.Parameter(torch.ones(1))})
    assert not isinstance(model[0].weight, DTensor)
    assert isinstance(model[0].bias, DTensor)
    for net in (model, plain):
        net(randn(3, 4)).square().sum().backward()
    assert torch.equal(model[0].weight.grad, plain[0].weight.grad)
    dist.all_reduce(plain[0].bias.grad)
    assert torch.equal(model[0].bias.grad.full_tensor(), plain[0].bias.grad / 2)


def test_names_of_data_parallel_dimensions_are_tuples():
    """As torch's class has them."""
    dims = DataParallelMeshDims("dp", ("host", "pod"))
    assert (dims.shard_names, dims.replicate_names) == (("dp",), ("host", "pod"))
    assert DataParallelMeshDims(replicate="host").shard_names == ()
