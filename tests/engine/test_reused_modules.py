"""Modules called several times in a forward, several forwards before a backward, and several backwards."""

import copy

import pytest
import torch
from torch import nn

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn.data_parallel import TrainingState
from tests.engine.random_nets import shard
from tests.kit import rank_device
from tests.models import mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import assert_same_step, average_grads_, randn, squares, train_alike, train_both

pytestmark = pytest.mark.behaviour("reused modules")


class Repeat(nn.Module):
    """Runs its layer ``times`` times."""

    def __init__(self, layer, times):
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x):
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x


@on_ranks(1, 2)
@pytest.mark.parametrize("times", [2, 5])
@pytest.mark.parametrize("reshard", [True, False])
def test_a_unit_called_several_times_in_a_forward(times, reshard):
    """The gradient of a unit is the sum over its calls, which autograd adds in the order in which it reaches them."""
    how = {"reshard_after_forward": reshard}
    train_both(Repeat(mlp(4, 4), times), FSDP(Repeat(FSDP(mlp(4, 4), **how), times), **how), squares)


class Tree(nn.Module):
    """A module whose forward calls the module itself, through its wrapper."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4).eval()
        self.wrapped = []  # a list, so that it is not its own submodule

    def forward(self, x, depth=2):
        x = self.norm(torch.tanh(self.before(x)))
        if depth:
            x = x + self.wrapped[0](x, depth - 1)
        return self.after(x)


class Forest(nn.Module):
    """A `Tree` between two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(4, 4), Tree(), nn.Linear(4, 2)

    def forward(self, x):
        inner = getattr(self.layer, "module", self.layer)
        inner.wrapped = [self.layer]
        return self.last(self.layer(self.first(x)))


@on_ranks(1, 2)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("door", ["wrapper", "orig_params", "fully_shard"])
def test_a_unit_that_calls_itself(door, reshard):
    """It stays gathered until its outermost call returns."""
    torch.manual_seed(1)
    plain = Forest().to(rank_device())
    wrapped = copy.deepcopy(plain)
    wrapped.is_unit = wrapped.layer.is_unit = True
    wrapped = shard(wrapped, door, reshard_after_forward=reshard)
    train_both(plain, wrapped, squares, rtol=2e-6, atol=2e-6)


@on_ranks(1, 2)
@pytest.mark.parametrize("wrap", [FSDP, wrap_each])
def test_several_forwards_before_one_backward(wrap):
    """Two forwards whose losses are added: one backward, the sum of both gradients, reduced once.

    Forwards before and after, whose outputs are never used, leave nothing behind.
    """

    def sum_of_two(model, key):
        squares(model, (key, "dropped"))
        loss = squares(model, (key, 0)) + 3 * squares(model, (key, 1))
        squares(model, (key, "dropped again"))
        return loss

    train_alike(mlp(4, 9, 5), wrap, sum_of_two)


def add_means(plain, losses):
    """Give ``plain`` the sum of the mean gradients of ``losses``, each of which runs a backward."""
    total = [torch.zeros_like(param) for param in plain.parameters()]
    for backward in losses:
        plain.zero_grad()
        backward()
        average_grads_(plain.parameters())
        for one, param in zip(total, plain.parameters(), strict=True):
            one.add_(param.grad)
    for one, param in zip(total, plain.parameters(), strict=True):
        param.grad = one


@on_ranks(1, 2)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_several_forwards_then_several_backwards(order):
    """Two forwards, then their backwards one after the other, in either order: shard gradients add up."""
    plain, wrapped = mlp(4, 9, 5), wrap_each(mlp(4, 9, 5))
    losses = [squares(wrapped, key) for key in range(2)]
    for index in order:
        losses[index].backward()
    add_means(plain, [lambda index=index: squares(plain, index).backward() for index in order])
    assert_same_step(plain, wrapped, averages=False)


@on_ranks(1, 2)
def test_backward_twice_with_retain_graph():
    """A second backward through the same graph adds the same gradient again."""
    wrapped = wrap_each(mlp(4, 9, 5))
    loss = squares(wrapped)
    loss.backward(retain_graph=True)
    once = [param.grad.clone() for param in wrapped.params_with_grad]
    loss.backward()
    for before, param in zip(once, wrapped.params_with_grad, strict=True):
        assert torch.equal(param.grad, before + before)


class TwoHeads(nn.Module):
    """Two outputs of a trunk."""

    def __init__(self, wrap=lambda module: module):
        super().__init__()
        torch.manual_seed(1)
        self.trunk, self.left, self.right = wrap(nn.Linear(4, 6)), wrap(nn.Linear(6, 2)), wrap(nn.Linear(6, 3))
        self.to(rank_device())

    def forward(self, x):
        hidden = torch.tanh(self.trunk(x))
        return {"left": self.left(hidden), "right": [self.right(hidden)]}


def loss_of_heads(model, key, name):
    output = model(randn(3, 4, key=key))[name]
    return (output[0] if name == "right" else output).square().sum()


@on_ranks(1, 2)
def test_backwards_from_two_outputs():
    """Two losses from two outputs of one forward, backwards one after the other: gradients add up."""
    plain, wrapped = TwoHeads(), FSDP(TwoHeads(FSDP))
    outputs = wrapped(randn(3, 4, key=0))
    outputs["left"].square().sum().backward(retain_graph=True)
    outputs["right"][0].square().sum().backward()
    add_means(plain, [lambda name=name: loss_of_heads(plain, 0, name).backward() for name in ("left", "right")])
    assert_same_step(plain, wrapped, averages=False)


@on_ranks(1, 2)
@pytest.mark.parametrize("wraps_each", [True, False])
def test_only_some_outputs_are_used(wraps_each):
    """With a loss from one of two outputs, parameters that only the other needs get zeros; nothing waits for them."""
    wrapped = FSDP(TwoHeads(FSDP) if wraps_each else TwoHeads())
    train_both(TwoHeads(), wrapped, lambda model, key: loss_of_heads(model, key, "left"))


@on_ranks(1, 2)
def test_gradients_of_inputs():
    """Inputs get the plain model's gradient, alone by `autograd.grad` or ``backward(inputs=...)``, or with others."""
    plain, wrapped = mlp(4, 9, 5), wrap_each(mlp(4, 9, 5))
    x, y, z = (randn(3, 4).requires_grad_() for _ in range(3))
    plain(x).square().sum().backward()
    (found,) = torch.autograd.grad(wrapped(y).square().sum(), [y])
    wrapped(z).square().sum().backward(inputs=[z])
    assert torch.equal(found, x.grad)
    assert torch.equal(z.grad, x.grad)
    assert wrapped.params_with_grad == []
    wrapped.assert_state(TrainingState.IDLE)
    wrapped(y).square().sum().backward()
    assert torch.equal(y.grad, x.grad)
    assert all(param.grad.any() for param in wrapped.parameters())
