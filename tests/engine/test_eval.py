"""Passes without gradients (eval, no_grad, inference_mode), and which units they leave gathered."""

import copy

import pytest
import torch
from torch import nn

from fairshard.engine.tree import units_below
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.models import mlp, tiny, tiny_batch, tiny_loss, wrap_each, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, assert_same_step, average_grads_, randn, sgd


def nothing_gathered(model):
    return not any(unit.is_gathered for _, unit in units_below(model))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("reshard", [True, False])
def test_output_equals_the_plain_models(mode, reshard):
    """Whatever the grad mode, outputs are those of the plain model; without grad nothing stays gathered."""
    plain = tiny()
    wrapped = wrap_tiny(copy.deepcopy(plain), reshard_after_forward=reshard)
    tokens, extra, _ = tiny_batch(0)
    for _ in range(2):
        with mode():
            expected, actual = plain.eval()(tokens, extra), wrapped.eval()(tokens, extra)
        assert torch.equal(actual, expected)
        assert actual.requires_grad == expected.requires_grad
    if mode is not torch.enable_grad:
        assert nothing_gathered(wrapped)


@on_ranks(1, 2)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("first", [True, False])
def test_validation_between_training_steps(mode, first):
    """Training with validation passes in between, even as the first pass, gives the plain model's weights."""
    plain = tiny()
    wrapped = wrap_tiny(copy.deepcopy(plain))
    of_plain, of_wrapped = sgd(plain), sgd(wrapped)
    tokens, extra, targets = tiny_batch(torch.distributed.get_rank())
    for step in range(3):
        if first or step:
            with mode():
                assert torch.equal(wrapped.eval()(tokens, extra), plain.eval()(tokens, extra))
        for one in (plain.train(), wrapped.train()):
            tiny_loss(one(tokens, extra), targets).backward()
        average_grads_(plain.parameters())
        for optimizer in (of_plain, of_wrapped):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(wrapped.state_dict(), plain.state_dict())


@on_ranks(2)
def test_validation_inside_no_sync():
    """A validation pass between accumulating passes does not lose what was accumulated."""
    plain = mlp(4, 9, 5)
    wrapped = wrap_each(copy.deepcopy(plain))
    with wrapped.no_sync():
        wrapped(randn(3, 4, key=0)).sum().backward()
        with torch.no_grad():
            wrapped(randn(3, 4, key=1))
    wrapped(randn(3, 4, key=2)).sum().backward()
    for key in (0, 2):
        plain(randn(3, 4, key=key)).sum().backward()
    assert_same_step(plain, wrapped)


@on_ranks(2)
def test_a_unit_called_without_grad_inside_a_pass_with_grad():
    """A branch under ``no_grad`` inside a training forward (a target network) gets no gradient; the rest does."""

    class Target(nn.Module):
        def __init__(self, wrap):
            super().__init__()
            self.online, self.target = wrap(mlp(4, 5, seed=1)), wrap(mlp(4, 5, seed=2))

        def forward(self, x):
            with torch.no_grad():
                goal = self.target(x)
            return (self.online(x) - goal).square().sum()

    plain, wrapped = Target(lambda module: module), FSDP(Target(FSDP))
    for _ in range(2):
        expected, actual = plain(randn(3, 4)), wrapped(randn(3, 4))
        assert torch.equal(actual, expected)
        actual.backward()
        assert wrapped.online.params[0].grad is not None
        assert wrapped.target.params[0].grad is None
        assert nothing_gathered(wrapped)


@on_ranks(2)
def test_modes_of_modules_are_theirs():
    """``eval()`` and ``train()`` reach the wrapped modules and turn dropout off and on."""
    wrapped = FSDP(nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)))
    x = randn(3, 4)
    wrapped.eval()
    with torch.no_grad():
        assert torch.equal(wrapped(x), wrapped(x))
        wrapped.train()
        assert (wrapped(x) == 0).any()
