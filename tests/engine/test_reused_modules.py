"""Modules called several times in a forward, several forwards before a backward, and several backwards."""

import copy

import pytest
import torch
from torch import nn

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn.data_parallel import TrainingState
from tests.engine.random_nets import shard, whole_state
from tests.kit import rank_device
from tests.models import mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, average_grads_, randn, sgd, train_alike


class Repeat(nn.Module):
    """Runs its layer ``times`` times."""

    def __init__(self, layer, times):
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x):
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x


def wrap_layer(model, **kwargs):
    model.layer = FSDP(model.layer, **kwargs)
    return FSDP(model, **kwargs)


def loss_of(model, key):
    return model(randn(3, 4, key=key)).square().sum()


@on_ranks(1, 2)
@pytest.mark.parametrize("times", [2, 5])
@pytest.mark.parametrize("reshard", [True, False])
def test_a_unit_called_several_times_in_a_forward(times, reshard):
    """The gradient of a unit is the sum over its calls."""
    model = Repeat(mlp(4, 4), times)
    # Autograd adds the gradients of the calls in the order in which it reaches them, which is the same for both.
    train_alike(model, lambda m: wrap_layer(m, reshard_after_forward=reshard), loss_of)


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
    for step in range(3):
        for model in (plain, wrapped):
            loss_of(model, step).backward()
        average_grads_(plain.parameters())
        for model in (plain, wrapped):
            sgd(model).step()
            model.zero_grad()
    assert_same_state(whole_state(wrapped), plain.state_dict(), rtol=2e-6, atol=2e-6)


@on_ranks(1, 2)
def test_several_forwards_before_one_backward():
    """Two forwards whose losses are added: one backward, the sum of both gradients, reduced once."""

    def sum_of_two(model, key):
        return loss_of(model, (key, 0)) + 3 * loss_of(model, (key, 1))

    train_alike(mlp(4, 9, 5), wrap_each, sum_of_two)
    train_alike(mlp(4, 9, 5), FSDP, sum_of_two)


@on_ranks(1, 2)
def test_several_forwards_then_several_backwards():
    """Two forwards, then their backwards one after the other, in either order: shard gradients add up."""
    for order in ((0, 1), (1, 0)):
        plain = mlp(4, 9, 5)
        wrapped = wrap_each(copy.deepcopy(plain))
        of_plain, of_wrapped = sgd(plain), sgd(wrapped)
        losses = [loss_of(wrapped, key) for key in range(2)]
        for index in order:
            losses[index].backward()
        total = [torch.zeros_like(param) for param in plain.parameters()]
        for index in order:
            plain.zero_grad()
            loss_of(plain, index).backward()
            average_grads_(plain.parameters())
            for one, param in zip(total, plain.parameters(), strict=True):
                one.add_(param.grad)
        for one, param in zip(total, plain.parameters(), strict=True):
            param.grad = one
        of_plain.step()
        of_wrapped.step()
        assert_same_state(wrapped.state_dict(), plain.state_dict())


@on_ranks(1, 2)
def test_backward_twice_with_retain_graph():
    """A second backward through the same graph adds the same gradient again."""
    wrapped = wrap_each(mlp(4, 9, 5))
    loss = loss_of(wrapped, 0)
    loss.backward(retain_graph=True)
    once = [param.grad.clone() for param in wrapped.params_with_grad]
    loss.backward()
    for before, param in zip(once, wrapped.params_with_grad, strict=True):
        assert torch.equal(param.grad, before + before)


@on_ranks(1, 2)
def test_backwards_from_two_outputs():
    """Two losses from two outputs of one forward, backwards one after the other: gradients add up."""

    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.trunk, self.left, self.right = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(6, 3)

        def forward(self, x):
            hidden = torch.tanh(self.trunk(x))
            return self.left(hidden), self.right(hidden)

    def wrap(model):
        for name in ("trunk", "left", "right"):
            setattr(model, name, FSDP(getattr(model, name)))
        return FSDP(model)

    plain = TwoHeads().to(rank_device())
    wrapped = wrap(copy.deepcopy(plain))
    for one in (plain, wrapped):
        left, right = one(randn(3, 4))
        left.square().sum().backward(retain_graph=True)
        if one is plain:
            average_grads_(plain.parameters())
            first = [param.grad for param in plain.parameters()]
            plain.zero_grad()
        right.square().sum().backward()
    average_grads_(plain.parameters())
    for param, earlier in zip(plain.parameters(), first, strict=True):
        param.grad = earlier + param.grad
    sgd(plain).step()
    sgd(wrapped).step()
    assert_same_state(wrapped.state_dict(), plain.state_dict())


@on_ranks(1, 2)
def test_only_some_outputs_are_used():
    """With a loss from one of two outputs, parameters that only the other needs get zeros; nothing waits for them."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.used, self.idle = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x):
            return {"used": self.used(x), "idle": [self.idle(x)]}

    def wrap(model):
        model.used, model.idle = FSDP(model.used), FSDP(model.idle)
        return FSDP(model)

    for wrapper in (FSDP, wrap):
        train_alike(
            Both().to(rank_device()), wrapper, lambda model, key: model(randn(3, 4, key=key))["used"].square().sum()
        )


@on_ranks(1, 2)
def test_a_dropped_output_is_followed_by_clean_steps():
    """Forwards whose outputs are never used leave nothing behind."""
    plain = mlp(4, 9, 5)
    wrapped = wrap_each(copy.deepcopy(plain))
    of_plain, of_wrapped = sgd(plain), sgd(wrapped)
    for step in range(3):
        wrapped(randn(3, 4, key=(step, "dropped")))
        expected, actual = loss_of(plain, step), loss_of(wrapped, step)
        assert torch.equal(actual, expected)
        expected.backward()
        actual.backward()
        wrapped(randn(3, 4, key=(step, "dropped again")))
        average_grads_(plain.parameters())
        for optimizer in (of_plain, of_wrapped):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(wrapped.state_dict(), plain.state_dict())


@on_ranks(1, 2)
def test_gradients_of_inputs():
    """An input that requires grad gets the gradient that the plain model gives it."""
    plain = mlp(4, 9, 5)
    wrapped = wrap_each(copy.deepcopy(plain))
    x, y = randn(3, 4).requires_grad_(), randn(3, 4).requires_grad_()
    plain(x).square().sum().backward()
    wrapped(y).square().sum().backward()
    assert torch.equal(x.grad, y.grad)


@on_ranks(2)
def test_autograd_grad_with_respect_to_inputs():
    """`torch.autograd.grad` on inputs works and gives no parameter a gradient; the next step is clean."""
    plain = mlp(4, 9, 5)
    wrapped = wrap_each(copy.deepcopy(plain))
    x, y = randn(3, 4).requires_grad_(), randn(3, 4).requires_grad_()
    (expected,) = torch.autograd.grad(plain(x).square().sum(), [x])
    (actual,) = torch.autograd.grad(wrapped(y).square().sum(), [y])
    assert torch.equal(actual, expected)
    assert wrapped.params_with_grad == []
    wrapped.assert_state(TrainingState.IDLE)
    loss_of(wrapped, 0).backward()
    assert all(param.grad.any() for param in wrapped.parameters())


@on_ranks(2)
def test_backward_with_inputs_only():
    """``backward(inputs=[x])`` fills the gradient of ``x`` and of nothing else."""
    wrapped = wrap_each(mlp(4, 9, 5))
    x = randn(3, 4).requires_grad_()
    wrapped(x).square().sum().backward(inputs=[x])
    assert x.grad is not None
    assert wrapped.params_with_grad == []
    loss_of(wrapped, 0).backward()
    assert all(param.grad.any() for param in wrapped.parameters())
