"""Activation checkpointing inside and around units, reentrant and not, gives the plain model's numbers."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from fairshard.engine.tree import units_below
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import fully_shard
from tests.engine.random_nets import whole_state
from tests.kit import rank_device
from tests.models import Block, mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, assert_same_step, average_grads_, randn, sgd, train_alike

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


def blocks(num_blocks=3):
    torch.manual_seed(1)
    return nn.ModuleList(Block(4, 3) for _ in range(num_blocks)).to(rank_device())


class Stack(nn.Module):
    """An input layer, checkpointed blocks, an output layer."""

    def __init__(self, use_reentrant, times=1):
        super().__init__()
        self.inner = mlp(4, 4, seed=5)
        self.blocks = nn.ModuleList(Checkpointed(block, use_reentrant, times) for block in blocks())
        self.outer = mlp(4, 2, seed=6)

    def forward(self, x):
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return self.outer(x)


def loss_of(model, key):
    return model(randn(3, 4, key=key)).square().sum()


def unit_inside(model):
    """checkpoint(unit): the recomputation enters the unit again."""
    for block in model.blocks:
        block.module = FSDP(block.module)
    return FSDP(model)


def unit_around(model):
    """unit(checkpoint): the recomputation runs inside the unit's backward."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FSDP(block)
    return FSDP(model)


def units_around_and_inside(model):
    """unit(checkpoint(part with units))."""
    for index, block in enumerate(model.blocks):
        block.module.up = FSDP(block.module.up)
        model.blocks[index] = FSDP(block)
    return FSDP(model)


def one_unit(model):
    """The whole model is one unit with checkpoints in it."""
    return FSDP(model)


@pytest.mark.pairs
@on_ranks(1, 2, 3)
@both_kinds
@pytest.mark.parametrize("wrap", [unit_inside, unit_around, units_around_and_inside, one_unit])
def test_checkpoints_change_no_number(use_reentrant, wrap):
    """With checkpoints inside and around units, losses and weights equal the plain model's to the bit."""
    wrapped = train_alike(Stack(use_reentrant), wrap, loss_of)
    assert not any(unit.is_gathered for _, unit in units_below(wrapped))


@on_ranks(1, 2)
@both_kinds
@pytest.mark.parametrize("wrap", [unit_inside, unit_around, one_unit])
def test_checkpointed_blocks_called_twice(use_reentrant, wrap):
    """A block that runs twice under checkpoints gets the sum of both gradients, where FSDP2 loses one.

    Each reentrant segment is a separate backward and may be reduced separately, which adds in another order and differs
    by one rounding of 2**-24. So one step is compared; more steps would amplify the difference.
    """
    num_steps, tolerance = (1, 1e-6) if use_reentrant else (3, None)
    model = Stack(use_reentrant, times=2)
    train_alike(model, wrap, loss_of, num_steps=num_steps, rtol=tolerance, atol=tolerance)


@on_ranks(2)
@both_kinds
def test_checkpoint_with_accumulation(use_reentrant):
    """Several backwards of checkpointed units add up."""
    train_alike_accumulated(Stack(use_reentrant))


def train_alike_accumulated(model):
    """Check that two passes under ``no_sync`` and one outside equal three passes of the plain model."""
    plain = copy.deepcopy(model)
    wrapped = unit_inside(model)
    with wrapped.no_sync():
        for key in range(2):
            loss_of(wrapped, key).backward()
    loss_of(wrapped, 2).backward()
    for key in range(3):
        loss_of(plain, key).backward()
    assert_same_step(plain, wrapped)


@on_ranks(2)
@both_kinds
def test_frozen_units_under_a_checkpoint(use_reentrant):
    """A frozen block between trainable ones, all checkpointed, trains as in the plain model."""
    model = Stack(use_reentrant)
    model.blocks[1].requires_grad_(False)
    train_alike(model, unit_inside, loss_of)


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

    def wrap(model):
        for name in ("one", "two", "three"):
            setattr(model, name, FSDP(getattr(model, name)))
        return FSDP(model)

    train_alike(Nested(use_reentrant, inner, again), wrap, loss_of)


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
@pytest.mark.parametrize("shard", [FSDP, fully_shard])
@pytest.mark.parametrize(
    ("use_reentrant", "again"),
    [(True, None), (True, "before"), (False, None), (False, "before"), (False, "after")],
)
def test_a_checkpoint_around_several_models(use_reentrant, again, shard):
    """Models that are in no other are gathered for all that their checkpoint recomputes."""

    def loss_of(model, key):
        return model(randn(3, 4, key=key).requires_grad_()).square()

    def wrap(model):
        model.one, model.two = shard(model.one), shard(model.two)
        return model

    plain, wrapped = Apart(use_reentrant, again), wrap(Apart(use_reentrant, again))
    of_plain, of_wrapped = sgd(plain), sgd(wrapped)
    for step in range(3):
        for model, optimizer in ((plain, of_plain), (wrapped, of_wrapped)):
            loss_of(model, step).backward()
            if model is plain:
                average_grads_(plain.parameters())
            optimizer.step()
            optimizer.zero_grad()
    for name in ("one", "two"):
        assert_same_state(whole_state(getattr(wrapped, name)), getattr(plain, name).state_dict(), 1e-6, 1e-6)


@on_ranks(2)
def test_torchs_checkpoint_wrapper():
    """torch's own wrapper module works inside and outside units, and its prefix does not appear in names."""

    def wrap(model, around):
        for index, layer in enumerate(model):
            if isinstance(layer, nn.Linear):
                model[index] = checkpoint_wrapper(FSDP(layer)) if around else FSDP(checkpoint_wrapper(layer))
        return FSDP(model)

    for around in (True, False):
        wrapped = wrap(mlp(4, 9, 5), around)
        wrapped(randn(3, 4)).sum().backward()
        assert [tuple(param.grad.shape) for param in wrapped.parameters()] == [(23,), (25,)]
        assert list(wrapped.state_dict()) == list(mlp(4, 9, 5).state_dict())


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
        loss_of(wrapped, step).backward()
        wrapped.assert_state(wrapped.training_state.IDLE)
        assert not any(unit.is_gathered for _, unit in units_below(wrapped))
