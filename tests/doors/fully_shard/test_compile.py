"""Each way to use torch.compile works inside sharded modules; around a sharded module it is refused."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fairshard.errors import FairshardError
from fairshard.nn import fully_shard
from fairshard.utils.testing import rank_device
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


@on_ranks(1)
def test_around_a_sharded_module_it_is_refused():
    """Compiling around a sharded module raises when the call is traced, with an error that names the fix."""
    model = torch.compile(fully_shard(nn.Linear(4, 4).to(rank_device())), backend="eager")
    with pytest.raises(Exception, match=r"`fully_shard\(torch.compile\(block\)\)`") as raised:
        model(torch.ones(2, 4, device=rank_device()))
    assert isinstance(raised.value, FairshardError) or "FairshardError" in str(raised.value)
