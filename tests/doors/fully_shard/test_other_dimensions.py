"""Parameters sharded along a dimension other than the first are contiguous in each rank's memory."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import Shard, distribute_tensor

from fairshard.nn import fully_shard
from tests.kit import rank_device
from tests.on_ranks import in_full, on_ranks
from tests.reference import randn

pytestmark = pytest.mark.behaviour("other dimensions")


def last_dimension(param):
    return Shard(param.ndim - 1)


def sharded_model():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv1d(2, 6, 6), nn.Flatten(), nn.Linear(6, 6)).to(rank_device())
    plain = copy.deepcopy(model)
    fully_shard(model[0], shard_placement_fn=last_dimension)
    return fully_shard(model, shard_placement_fn=last_dimension), plain


@on_ranks(in_full(1), 2, in_full(3))
def test_local_tensors_are_those_of_torch():
    """Local parameters and gradients are contiguous, with the shapes, strides and values that torch gives them."""
    model, plain = sharded_model()
    model(randn(3, 2, 6)).sum().backward()
    for param, whole in zip(model.parameters(), plain.parameters(), strict=True):
        expected = distribute_tensor(whole.detach(), param.device_mesh, param.placements)
        for shown in (param, param.grad):
            assert shown.to_local().shape == expected.to_local().shape
            assert shown.to_local().is_contiguous()
            assert shown.stride() == expected.stride()
        assert torch.equal(param.to_local(), expected.to_local())
        assert torch.equal(param.detach().reshape(len(whole), -1).full_tensor(), whole.reshape(len(whole), -1))


@on_ranks(in_full(1), 2, in_full(3))
def test_fused_optimizers_after_a_restore():
    """A restore keeps parameter, gradient and moments in one memory order, which fused kernels rely on."""
    model, _ = sharded_model()
    whole = StateDictOptions(full_state_dict=True)

    def train(restores):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for key in range(2):
            model(randn(3, 2, 6, key=key)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if restores:
                state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=whole))
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
                set_optimizer_state_dict(model, optimizer, state, options=whole)
        return [param.full_tensor().detach().clone() for param in model.parameters()]

    start = copy.deepcopy(model.state_dict())
    expected = train(restores=False)
    model.load_state_dict(start)
    for one, other in zip(train(restores=True), expected, strict=True):
        assert torch.equal(one, other)
