"""On one rank the model computes as if it were not sharded, and nothing is sent."""

import copy

import pytest
import torch
from torch.distributed.tensor import DTensor

from fairshard.nn import MixedPrecisionPolicy, fully_shard
from fairshard.utils.collectives import counters, reset_counters
from tests.models import loss_of_tiny, tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, sgd


def train(model, num_steps=3):
    optimizer = sgd(model)
    losses = []
    for step in range(num_steps):
        loss = loss_of_tiny(model, (step,))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def sharded(model, **how):
    for block in (model.first, model.second):
        fully_shard(block, **how)
    return fully_shard(model, **how)


@on_ranks(1)
@pytest.mark.parametrize("reshard", [True, False, None])
@pytest.mark.parametrize("cap", [0, 25])
def test_it_trains_as_the_plain_model(reshard, cap):
    """Losses and weights equal the plain model's bit for bit; each DTensor holds the whole parameter."""
    plain = tiny()
    model = sharded(copy.deepcopy(plain), reshard_after_forward=reshard, bucket_cap_mb=cap)
    assert all(isinstance(param, DTensor) and param.to_local().shape == param.shape for param in model.parameters())
    reset_counters()
    assert all(torch.equal(*pair) for pair in zip(train(model), train(plain), strict=True))
    assert counters() == {}
    assert_same_state({name: value.full_tensor() for name, value in model.state_dict().items()}, plain.state_dict())


@on_ranks(1)
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)])
def test_a_divide_factor_divides_though_there_is_nothing_to_sum(policy):
    """A factor of 2 halves gradients exactly, in the dtype that they would be reduced in."""
    models = [sharded(tiny(), mp_policy=policy) for _ in range(2)]
    for unit in (models[1], models[1].first, models[1].second):
        unit.set_gradient_divide_factor(2.0)
    for model in models:
        loss_of_tiny(model, ()).backward()
    for whole, half in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(half.grad.full_tensor() * 2, whole.grad.full_tensor())
