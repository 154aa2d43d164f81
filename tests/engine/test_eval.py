"""Passes without gradients (eval, no_grad, inference_mode), and which units they leave gathered."""

import copy

import pytest
import torch
from torch import nn

from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.kit.doors import gathered
from tests.models import loss_of_tiny, mlp, tiny, tiny_batch, wrap_each, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_step, randn, squares, train_both

pytestmark = pytest.mark.behaviour("evaluation")


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
    assert mode is torch.enable_grad or gathered(wrapped) == []


@on_ranks(1, 2)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("first", [True, False])
def test_validation_between_training_steps(mode, first):
    """Training with validation passes in between, even as the first pass, gives the plain model's weights."""

    def loss_of(model, key):
        if first or key[0]:
            with mode():
                loss_of_tiny(model.eval(), key)
        return loss_of_tiny(model.train(), key)

    train_both(tiny(), wrap_tiny(tiny()), loss_of)


@on_ranks(2)
def test_validation_inside_no_sync():
    """A validation pass between accumulating passes does not lose what was accumulated."""
    plain, wrapped = mlp(4, 9, 5), wrap_each(mlp(4, 9, 5))
    with wrapped.no_sync():
        squares(wrapped, 0).backward()
        with torch.no_grad():
            wrapped(randn(3, 4, key=1))
    squares(wrapped, 2).backward()
    for key in (0, 2):
        squares(plain, key).backward()
    assert_same_step(plain, wrapped)


class Target(nn.Module):
    """Trains a net towards another one, which is called without gradients."""

    def __init__(self, wrap=lambda module: module):
        super().__init__()
        self.online, self.target = wrap(mlp(4, 5, seed=1)), wrap(mlp(4, 5, seed=2))

    def forward(self, x):
        with torch.no_grad():
            goal = self.target(x)
        return (self.online(x) - goal).square().sum()


@on_ranks(2)
def test_a_unit_called_without_grad_inside_a_pass_with_grad():
    """A branch under ``no_grad`` inside a training forward (a target network) gets no gradient; the rest does."""
    plain, wrapped = Target(), FSDP(Target(FSDP))
    for _ in range(2):
        expected, actual = plain(randn(3, 4)), wrapped(randn(3, 4))
        assert torch.equal(actual, expected)
        actual.backward()
        assert wrapped.online.params[0].grad is not None
        assert wrapped.target.params[0].grad is None
        assert gathered(wrapped) == []


@on_ranks(2)
def test_modes_of_modules_are_theirs():
    """``eval()`` and ``train()`` reach the wrapped modules and turn dropout off and on."""
    wrapped, x = FSDP(nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))), randn(3, 4)
    with torch.no_grad():
        wrapped.eval()
        assert torch.equal(wrapped(x), wrapped(x))
        wrapped.train()
        assert (wrapped(x) == 0).any()
