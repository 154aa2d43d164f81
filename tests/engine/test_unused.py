"""Branches that are not taken, and outputs that need no parameter; ranks that differ are in the random nets."""

import pytest
import torch
from torch import nn

from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.kit import rank_device
from tests.models import mlp
from tests.on_ranks import on_ranks
from tests.reference import randn, train_alike

pytestmark = pytest.mark.behaviour("unused parameters")


class Chosen(nn.Module):
    """Three branches, of which steps take the first ``num_taken`` in turn."""

    def __init__(self, num_taken):
        super().__init__()
        self.num_taken = num_taken
        self.trunk = mlp(4, 6, seed=1)
        self.branches = nn.ModuleList([mlp(6, 5, seed=2), mlp(6, 5, seed=3), mlp(6, 5, seed=4)])

    def forward(self, x, step):
        return self.branches[step % self.num_taken](torch.tanh(self.trunk(x)))


def wrap_branches(model, **kwargs):
    for index, branch in enumerate(model.branches):
        model.branches[index] = FSDP(branch, **kwargs)
    return FSDP(model, **kwargs)


def wrap_all(model, **kwargs):
    model.trunk = FSDP(model.trunk, **kwargs)
    return wrap_branches(model, **kwargs)


def loss_of_chosen(model, key):
    return model(randn(3, 4, key=key), key[0]).square().sum()


@pytest.mark.pairs
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("wrap", [FSDP, wrap_branches, wrap_all], ids=["one", "branches", "all"])
@pytest.mark.parametrize("num_taken", [1, 2])
@pytest.mark.parametrize("flatten", [True, False])
def test_branches_that_are_not_taken(wrap, num_taken, flatten):
    """A branch that is never taken keeps its weights; one taken in some steps trains as on the plain model.

    There is no momentum, because an unreached unit has no gradient but an unreached part of a flat shard has zeros,
    and momentum treats them differently.
    """
    train_alike(
        Chosen(num_taken).to(rank_device()),
        lambda model: wrap(model, flatten_parameters=flatten),
        loss_of_chosen,
        num_steps=4,
        momentum=0.0,
    )


class Skip(nn.Linear):
    """Its output needs no gradient of its parameters."""

    def forward(self, x):
        return x * 1 + 0 * super().forward(x).detach()


@on_ranks(2)
def test_a_loss_that_does_not_need_the_parameters():
    """A unit whose output reaches the loss but not its parameters reduces zeros, or nothing; it does not hang."""
    wrapped = FSDP(nn.Sequential(nn.Linear(4, 4), FSDP(Skip(4, 4))).to(rank_device()))
    for _ in range(2):
        wrapped(randn(3, 4)).sum().backward()
    skipped = wrapped[1].params[0].grad
    assert skipped is None or not skipped.any()
    assert wrapped.params[0].grad.any()
