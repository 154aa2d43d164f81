"""A list of modules that is one unit is gathered before the first call and freed after the last."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fairshard.engine.tree import units_below
from fairshard.nn import MixedPrecisionPolicy, fully_shard
from tests.kit import rank_device
from tests.kit.doors import gathered, num_gathers
from tests.on_ranks import in_full, on_ranks
from tests.reference import randn, squares, train_both

pytestmark = pytest.mark.behaviour("units of several modules")

GROUP = "layers.0, layers.2"


class Net(nn.Module):
    """Four Linears, called in the order ``calls``."""

    def __init__(self, calls=(0, 1, 2, 3), recompute=None):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.calls = calls
        self.recompute = recompute
        self.to(rank_device())

    def forward(self, x):
        for call in self.calls:
            layer = self.layers[call]
            if self.recompute is None:
                x = torch.tanh(layer(x))
            else:
                x = torch.tanh(checkpoint(layer, x, use_reentrant=self.recompute))
        return x


def sharded(*how):
    """The first and the third layer as one unit, and the rest as another."""
    model = Net(*how)
    fully_shard([model.layers[0], model.layers[2]])
    return fully_shard(model)


CALLS = [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 0, 2, 3), (0, 1, 2, 3, 0, 2), (0, 0, 1, 2, 2)]


@on_ranks(2, in_full(1), in_full(3))
@pytest.mark.parametrize("recompute", [None, True, False])
def test_orders_of_calls(recompute):
    """Members called in any order, twice, with others between, or in checkpoints train as the plain model."""
    for calls in CALLS:
        model = sharded(calls, recompute)
        train_both(Net(calls, recompute), model, squares)
        assert gathered(model) == [], calls


@on_ranks(2)
def test_gathered_once_for_all():
    """A forward gathers a group once, and its parameters are whole from the first call to the last."""
    model = sharded()
    seen = []
    for layer in model.layers:
        layer.register_forward_pre_hook(
            lambda *_: seen.append([not isinstance(m.weight, DTensor) for m in model.layers])
        )
    with torch.no_grad():
        model(randn(2, 4))
        num_gathers()
        seen.clear()
        model(randn(2, 4))
    assert num_gathers() == 2
    assert seen == [[True] * 4] * 3 + [[False, True, False, True]]
    assert [fqn for fqn, _ in units_below(model)] == ["", GROUP]


@on_ranks(2)
def test_one_that_is_not_called():
    """The group stays gathered until its backward or the pass ends; the member not called gets no gradients."""
    model = sharded((0, 1, 3))
    loss = model(randn(2, 4)).sum()
    assert GROUP in gathered(model)
    loss.backward()
    assert gathered(model) == []
    assert all(param.grad is None for param in model.layers[2].parameters())
    model.zero_grad()
    with torch.no_grad():
        model(randn(2, 4))
    assert gathered(model) == []
    train_both(Net((0, 1, 3)), model, squares)


class Outer(nn.Module):
    """A Linear around another."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.own = nn.Linear(4, 4)

    def forward(self, x):
        return self.own(torch.tanh(self.inner(x)))


@on_ranks(2)
def test_one_nested_in_another():
    """A member inside another member is gathered with it when either is called."""

    def build():
        torch.manual_seed(1)
        return nn.Sequential(Outer(), nn.Linear(4, 4)).to(rank_device())

    model, plain = build(), build()
    fully_shard([model[0], model[0].inner])
    fully_shard(model)
    train_both(plain, model, squares)
    with torch.no_grad():
        assert torch.equal(model[0].inner(randn(2, 4)), plain[0].inner(randn(2, 4)))


@on_ranks(2)
def test_policies_of_a_group():
    """Inputs and outputs of each member are cast; with ``cast_forward_inputs=False``, inputs are not."""
    for casts in (True, False):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32, cast_forward_inputs=casts)
        model, seen = Net(), []
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].dtype))
        fully_shard([model.layers[0], model.layers[2]], mp_policy=policy)
        fully_shard(model)
        if casts:
            assert model(randn(2, 4)).dtype is torch.float32
            assert seen == [torch.bfloat16, torch.float32] * 2
        else:
            with pytest.raises(RuntimeError, match="dtype"):
                model(randn(2, 4))
            assert seen == [torch.float32]


@on_ranks(2)
def test_exceptions_between_members():
    """A pass that raises between two members leaves the group sharded, and the next passes train correctly."""
    model = sharded()
    armed = [1]

    def strike(*_):
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    model.layers[1].register_forward_pre_hook(strike)
    with pytest.raises(KeyboardInterrupt):
        model(randn(2, 4))
    assert gathered(model) == []
    train_both(Net(), model, squares)


@on_ranks(2)
def test_by_hand():
    """``unshard``, ``reshard`` and settings of any member apply to the whole group."""
    model = sharded()
    model.layers[2].unshard()
    assert not isinstance(model.layers[0].weight, DTensor)
    model.layers[0].reshard()
    assert isinstance(model.layers[2].weight, DTensor)
    model.layers[0].set_reshard_after_forward(False)
    model(randn(2, 4))
    assert GROUP in gathered(model)
