"""Activation checkpointing inside and around units, reentrant and not, gives the plain model's numbers."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.kit import rank_device
from tests.kit.doors import both_apis, gathered, shard, sharding, whole
from tests.models import Block, mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, average_grads_, randn, run_steps, squares, train_both

pytestmark = pytest.mark.behaviour("activation checkpointing")

both_kinds = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not_reentrant"])


class Checkpointed(nn.Module):
    """Runs its module under a checkpoint. The plain replica of a test runs the same way."""

    def __init__(self, module, use_reentrant, times=1):
        super().__init__()
        self.module, self.use_reentrant, self.times = module, use_reentrant, times

    def forward(self, x):
        for _ in range(self.times):
            x = checkpoint(self.module, x, use_reentrant=self.use_reentrant)
        return x


def stack(use_reentrant, times=1):
    """An input layer, checkpointed blocks, an output layer."""
    torch.manual_seed(1)
    blocks = [Checkpointed(Block(4, 3), use_reentrant, times) for _ in range(3)]
    return nn.Sequential(nn.Linear(4, 4), *blocks, nn.Linear(4, 2)).to(rank_device())


def each(pattern):
    return [pattern.format(index) for index in (1, 2, 3)]


UNITS = {
    "inside": each("{}.module"),  # the recomputation enters the unit again
    "around": each("{}"),  # the recomputation runs inside the unit's backward
    "both": [*each("{}.module.up"), *each("{}")],
    "one": [],  # the whole model is one unit with checkpoints in it
}
with_units = pytest.mark.parametrize("units", UNITS)


@pytest.mark.pairs
@on_ranks(1, 2, 3)
@both_kinds
@both_apis
@with_units
def test_checkpoints_change_no_number(use_reentrant, door, units):
    """With checkpoints inside and around units, losses and weights equal the plain model's to the bit.

    A frozen block among them changes nothing of that.
    """
    plain, model = stack(use_reentrant), stack(use_reentrant)
    for net in (plain, model):
        net[2].requires_grad_(False)
    model = shard(model, door, *UNITS[units])
    train_both(plain, model, squares)
    assert gathered(model) == []


@pytest.mark.pairs
@on_ranks(1, 2)
@both_kinds
@pytest.mark.parametrize("units", ["inside", "around", "one"])
def test_checkpointed_blocks_called_twice(use_reentrant, units):
    """A block that runs twice under checkpoints gets the sum of both gradients, where FSDP2 loses one.

    Each reentrant segment is a separate backward and may be reduced separately, which adds in another order and differs
    by one rounding of 2**-24. So one step is compared; more steps would amplify the difference.
    """
    num_steps, tolerance = (1, 1e-6) if use_reentrant else (3, None)
    model = shard(stack(use_reentrant, 2), "flat", *UNITS[units])
    train_both(stack(use_reentrant, 2), model, squares, num_steps=num_steps, rtol=tolerance, atol=tolerance)


@on_ranks(2)
@both_kinds
def test_checkpoint_with_accumulation(use_reentrant):
    """Two passes under ``no_sync`` and one outside equal three passes of the plain model."""
    plain, model = stack(use_reentrant), shard(stack(use_reentrant), "flat", *UNITS["inside"])
    losses = [run_steps(net, squares, 2, 3, clip=average) for net, average in ((model, lambda _: None), (plain, mean))]
    assert losses[0] == losses[1]
    assert_same_state(whole(model), plain.state_dict())


def mean(plain):
    """Average the gradients of a plain model over ranks."""
    average_grads_(plain.parameters())


class Nested(nn.Module):
    """A checkpoint that runs a unit, then checkpoints of two others, of either kind, and maybe the first again."""

    def __init__(self, outer, inner, again):
        super().__init__()
        self.outer, self.inner, self.again = outer, inner, again
        self.first, self.one, self.two, self.three = (mlp(4, 4, seed=seed) for seed in range(4))

    def inside(self, x):
        x = self.one(x)
        for unit in (self.two, self.three):
            x = checkpoint(unit, x.cos(), use_reentrant=self.inner)
        return self.one(x) if self.again else x

    def forward(self, x):
        return checkpoint(self.inside, self.first(x), use_reentrant=self.outer).sin()


@on_ranks(2)
@pytest.mark.parametrize("again", [False, True], ids=["last", "between"])
@pytest.mark.parametrize("inner", [True, False], ids=["reentrant_inside", "not_reentrant_inside"])
@both_kinds
def test_checkpoints_inside_of_checkpoints(use_reentrant, inner, again):
    """The units of the outermost are gathered for all that it recomputes, in any order of the two kinds."""
    plain = Nested(use_reentrant, inner, again)
    train_both(plain, shard(copy.deepcopy(plain), "flat", "one", "two", "three"), squares)


class Apart(nn.Module):
    """Two models, which no unit is around: one checkpoint runs both, and one of them runs again outside of it."""

    def __init__(self, use_reentrant, again):
        super().__init__()
        self.one, self.two = mlp(4, 4, seed=5), mlp(4, 4, seed=6)
        self.use_reentrant, self.again = use_reentrant, again

    def forward(self, x):
        if self.again == "before":
            x = self.two(x)
        y = checkpoint(lambda x: self.two(self.one(x).sin()), x, use_reentrant=self.use_reentrant)
        if self.again == "after":
            return y.mean() + self.one(y.cos()).mean()
        return x.mean() + y.mean()


@on_ranks(2)
@both_apis
@pytest.mark.parametrize(
    ("use_reentrant", "again"),
    [(True, None), (True, "before"), (False, None), (False, "before"), (False, "after")],
)
def test_a_checkpoint_around_several_models(use_reentrant, again, door):
    """Models that are in no other are gathered for all that their checkpoint recomputes."""
    plain, model, one = Apart(use_reentrant, again), Apart(use_reentrant, again), sharding(door)
    model.one, model.two = one(model.one), one(model.two)
    train_both(plain, model, squares, rtol=1e-6, atol=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("around", [True, False])
def test_torchs_checkpoint_wrapper(around):
    """torch's own wrapper module works inside and outside units, and its prefix does not appear in names."""
    plain, model = mlp(4, 9, 5), mlp(4, 9, 5)
    for index in (0, 2):
        layer = model[index]
        model[index] = checkpoint_wrapper(FSDP(layer)) if around else FSDP(checkpoint_wrapper(layer))
    train_both(plain, FSDP(model), squares)


@on_ranks(2)
def test_checkpoint_sequential():
    """``checkpoint_sequential`` over a Sequential of units gives the plain model's input gradients."""
    plain = mlp(4, 9, 7, 5)
    wrapped = wrap_each(copy.deepcopy(plain))
    x, y = randn(3, 4).requires_grad_(), randn(3, 4).requires_grad_()
    checkpoint_sequential(plain, 2, x, use_reentrant=False).sum().backward()
    checkpoint_sequential(wrapped.module, 2, y, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, y.grad)


@on_ranks(2)
def test_early_stop_leaves_units_clean():
    """A recomputation that stops early, by raising inside a unit, leaves the unit idle and freed."""
    wrapped = FSDP(Checkpointed(wrap_each(mlp(4, 9, 5)), use_reentrant=False))
    for step in range(3):
        squares(wrapped, step).backward()
        wrapped.assert_state(wrapped.training_state.IDLE)
        assert gathered(wrapped) == []
