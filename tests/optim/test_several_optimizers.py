"""Several optimizers over one model: each sees its own parameters, and only those."""

import pytest
import torch

from fairshard.optim import CPUOptimizer
from tests.models import mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn

PLACEMENTS = pytest.mark.parametrize(
    "placement",
    [{"cpu_offload": True}, {"move_grads_to_cpu": True}, {"cpu_offload": True, "move_grads_to_cpu": False}],
    ids=["offload", "master", "held"],
)


def loss_of(model):
    return model(randn(3, 4)).square().sum()


def sgd_reference():
    """The model after one step of SGD on all its parameters."""
    model = wrap_each(mlp(4, 9, 5))
    loss_of(model).backward()
    torch.optim.SGD(model.parameters(), lr=0.1, fused=True).step()
    return model.state_dict()


@on_ranks(2)
@PLACEMENTS
def test_zeroing_one_leaves_the_gradients_of_the_other(placement):
    """If the first optimizer's `zero_grad` runs before the second's step, the second still steps its own gradients."""
    model = wrap_each(mlp(4, 9, 5), **placement)
    first, second = (CPUOptimizer(model, torch.optim.SGD, params=[param], lr=0.1) for param in model.parameters())
    loss_of(model).backward()
    for optimizer in (first, second):
        optimizer.step()
        optimizer.zero_grad()
    assert_same_state(model.state_dict(), sgd_reference())


@on_ranks(2)
@pytest.mark.parametrize("placement", [{"cpu_offload": True}, {"move_grads_to_cpu": True}], ids=["offload", "master"])
def test_gradients_that_are_not_stepped_early_are_there_for_others(placement):
    """After `last_backward` of an optimizer over one shard, the other shard has its gradient for plain SGD."""
    model = wrap_each(mlp(4, 9, 5), **placement)
    one, other = model.parameters()
    ours = CPUOptimizer(model, torch.optim.SGD, params=[one], lr=0.1, overlap=True)
    plain = torch.optim.SGD([other], lr=0.1, fused=True)
    with ours.last_backward():
        loss_of(model).backward()
    assert other.grad is not None
    ours.step()
    plain.step()
    assert_same_state(model.state_dict(), sgd_reference())


@on_ranks(1)
def test_shards_of_another_model_are_refused():
    """Shards of another model raise at construction and in `add_param_group`: nothing would fetch their gradients."""
    model, stranger = (wrap_each(mlp(4, 5), cpu_offload=True, move_grads_to_cpu=False) for _ in range(2))
    with pytest.raises(ValueError, match=r"`0\.flat_param_0` belongs to another"):
        CPUOptimizer(model, torch.optim.SGD, params=[*model.parameters(), *stranger.parameters()], lr=0.1)
    optimizer = CPUOptimizer(model, torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="belongs to another"):
        optimizer.add_param_group({"params": list(stranger.parameters())})
    assert len(optimizer.param_groups) == 1
