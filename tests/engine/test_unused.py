"""Parameters that a pass does not reach: zeros, no stalled bucket, no hang, whatever the other ranks reach."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import fully_shard
from tests.kit import rank_device
from tests.models import mlp
from tests.on_ranks import on_ranks
from tests.reference import randn, train_alike


class Chosen(nn.Module):
    """Three branches; each step takes the one that ``choose(step)`` names, and one is never taken."""

    def __init__(self, choose):
        super().__init__()
        self.choose = choose
        self.trunk = mlp(4, 6, seed=1)
        self.branches = nn.ModuleList([mlp(6, 5, seed=2), mlp(6, 5, seed=3), mlp(6, 5, seed=4)])

    def forward(self, x, step):
        return self.branches[self.choose(step)](torch.tanh(self.trunk(x)))


def wrap_branches(model, **kwargs):
    for index, branch in enumerate(model.branches):
        model.branches[index] = FSDP(branch, **kwargs)
    return FSDP(model, **kwargs)


def wrap_all(model, **kwargs):
    model.trunk = FSDP(model.trunk, **kwargs)
    return wrap_branches(model, **kwargs)


def loss_of(model, key):
    step, _ = key
    return model(randn(3, 4, key=key), step).square().sum()


def alternate(step):
    return step % 2


def never_the_last(step):
    return 0


@pytest.mark.pairs
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("wrap", [FSDP, wrap_branches, wrap_all], ids=["one", "branches", "all"])
@pytest.mark.parametrize("choose", [alternate, never_the_last])
@pytest.mark.parametrize("flatten", [True, False])
def test_branches_that_are_not_taken(wrap, choose, flatten):
    """A branch that is never taken keeps its weights; one taken in some steps trains as on the plain model.

    There is no momentum, because an unreached unit has no gradient but an unreached part of a flat shard has zeros,
    and momentum treats them differently.
    """
    train_alike(
        Chosen(choose).to(rank_device()),
        lambda model: wrap(model, flatten_parameters=flatten),
        loss_of,
        num_steps=4,
        momentum=0.0,
    )


@on_ranks(2)
def test_unused_parameters_of_a_flat_shard_have_zero_gradients():
    """In a flat shard that is reached, unused parameters get zeros; the backward ends with everything reduced."""
    layers = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            return self.layers["used"](x)

    wrapped = FSDP(Half().to(rank_device()))
    wrapped(randn(3, 4)).sum().backward()
    (shard,) = wrapped.params
    line = [torch.empty_like(shard.grad) for _ in range(2)]
    dist.all_gather(line, shard.grad)
    line = torch.cat(line)
    assert line[:20].any()
    assert not line[20:].any()


@on_ranks(2)
def test_a_parameter_that_only_one_rank_uses():
    """In one unit, ranks may use different parameters: each contributes zeros for what it did not use."""
    model = Chosen(lambda step: dist.get_rank()).to(rank_device())
    train_alike(model, FSDP, loss_of)


class AllRun(Chosen):
    """`Chosen`, but all branches compute, because ranks must agree on forwards; the last branch is never used."""

    def forward(self, x, step):
        trunk = torch.tanh(self.trunk(x))
        return [branch(trunk) for branch in self.branches][self.choose(step)]


@on_ranks(2, 3)
def test_units_that_only_some_ranks_reach():
    """The backwards of the ranks reach different units: each gradient is the mean, with zeros from the other ranks."""
    model = AllRun(lambda step: (step + dist.get_rank()) % 2).to(rank_device())
    train_alike(model, wrap_all, loss_of, num_steps=4)


@on_ranks(1, 2)
def test_what_no_rank_reaches_keeps_no_gradient():
    """With one gradient per parameter, a branch that no rank uses keeps None; other parameters have a gradient."""
    model = AllRun(lambda step: dist.get_rank()).to(rank_device())
    for part in (model.trunk, *model.branches, model):
        fully_shard(part)
    loss_of(model, (0, 0)).backward()
    have = {name for name, param in model.named_parameters() if param.grad is not None}
    used = [model.trunk, *model.branches[: dist.get_world_size()]]
    assert have == {
        name
        for name, param in model.named_parameters()
        if any(param is own for part in used for own in part.parameters())
    }


@on_ranks(2)
def test_a_loss_that_does_not_need_the_parameters():
    """A unit whose output reaches the loss but not its parameters reduces zeros, or nothing; it does not hang."""

    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return x * 1 + 0 * self.layer(x).detach()

    wrapped = FSDP(nn.Sequential(nn.Linear(4, 4), FSDP(Skip())).to(rank_device()))
    for _ in range(2):
        wrapped(randn(3, 4)).sum().backward()
    skipped = wrapped[1].params[0].grad
    assert skipped is None or not skipped.any()
    assert wrapped.params[0].grad.any()
