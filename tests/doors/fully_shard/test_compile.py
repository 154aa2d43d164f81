"""Each way to use torch.compile inside sharded modules works."""

import copy

import pytest
import torch
from torch.distributed.tensor import DTensor

from fairshard.nn import fully_shard
from tests.models import mlp
from tests.on_ranks import on_ranks
from tests.reference import average_grads_, randn


def compiled_before(block):
    return fully_shard(torch.compile(block, backend="eager", fullgraph=True))


def compiled_in_place_before(block):
    block.compile(backend="eager", fullgraph=True)
    return fully_shard(block)


def compiled_in_place_after(block):
    fully_shard(block)
    block.compile(backend="eager", fullgraph=True)
    return block


@on_ranks(2)
@pytest.mark.parametrize("shard", [compiled_before, compiled_in_place_before, compiled_in_place_after])
def test_compiled_blocks_train_as_uncompiled_ones(shard):
    """Blocks train alike whether compiled before sharding, in place before sharding, or in place after it."""
    torch.compiler.reset()  # what other tests have compiled on this rank counts against torch's limit
    plain = mlp(6, 5, 4)
    model = copy.deepcopy(plain)
    for index in (0, 2):
        model[index] = shard(model[index])
    fully_shard(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        for each in (plain, model):
            each(randn(3, 6, key=step)).square().sum().backward()
        average_grads_(plain.parameters())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(param, DTensor)
        assert torch.equal(param.full_tensor(), expected)
