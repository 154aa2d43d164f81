"""Frozen parameters are sharded separately, have no gradient and no reduction, and pass gradients to their inputs."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairshard.engine.tree import units_below
from fairshard.errors import FairshardError
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.kit import rank_device
from tests.models import Block, mlp, wrap_each
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, average_grads_, randn, sgd, train_alike

FULL = pytest.mark.full


def loss_of(model, key):
    return model(randn(3, 4, key=key)).square().sum()


def frozen_mlp(*indices):
    model = mlp(4, 9, 7, 5)
    for index in indices:
        model[index].requires_grad_(False)
    return model


@pytest.mark.pairs
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("wrap", [FSDP, wrap_each], ids=["one", "each"])
@pytest.mark.parametrize("indices", [(0,), (2,), (4,), (0, 2), (0, 4)], ids=str)
def test_frozen_layers_train_as_on_the_plain_model(flatten, wrap, indices):
    """With frozen layers first, in the middle, last, or several, the others train as on the plain model."""
    train_alike(frozen_mlp(*indices), lambda model: wrap(model, flatten_parameters=flatten), loss_of)


@on_ranks(2)
def test_frozen_and_trainable_parameters_of_a_unit_are_apart():
    """A unit has one flat parameter per ``requires_grad``; the frozen one keeps its value, and never has a gradient."""
    model = Block(4, 5)
    model.up.requires_grad_(False)
    model.norm.bias.requires_grad_(False)
    wrapped = FSDP(model.to(rank_device()))
    assert sorted(param.requires_grad for param in wrapped.params) == [False, True]
    (frozen,) = (param for param in wrapped.params if not param.requires_grad)
    before = frozen.detach().clone()
    optimizer = sgd(wrapped)
    for step in range(2):
        loss_of(wrapped, step).backward()
        assert frozen.grad is None
        optimizer.step()
    assert torch.equal(frozen, before)
    assert wrapped.params_with_grad == [param for param in wrapped.params if param.requires_grad]


@on_ranks(2)
def test_gradients_pass_through_a_frozen_model():
    """A model that is frozen as a whole gives its inputs their gradients, as the plain one does."""
    plain = frozen_mlp(0, 2, 4)
    wrapped = wrap_each(copy.deepcopy(plain))
    x, y = randn(3, 4).requires_grad_(), randn(3, 4).requires_grad_()
    plain(x).square().sum().backward()
    wrapped(y).square().sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert not any(unit.is_gathered for _, unit in units_below(wrapped))


class Offset(nn.Module):
    """Returns its weight, alone or added to the input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x=None):
        return torch.tanh(self.weight if x is None else x + self.weight)


class Around(nn.Module):
    """A short path through one Linear, and a long path through an inner module and another Linear three times."""

    def __init__(self, inner_takes, frozen):
        super().__init__()
        torch.manual_seed(4)
        self.inner_takes = inner_takes
        self.short, self.long = nn.Linear(4, 4), nn.Linear(4, 4)
        self.inner = Offset()
        for name in frozen:
            getattr(self, name).requires_grad_(False)

    def forward(self, x):
        inputs = {"nothing": [], "detached": [x.detach()], "input": [x]}[self.inner_takes]
        y = self.inner(*inputs)
        for _ in range(3):
            y = torch.tanh(self.long(y))
        return self.short(x) + y


FROZEN = [("short", "long"), *(pytest.param(frozen, marks=FULL) for frozen in (("long",), ("short",), ()))]
OFFLOAD = pytest.param({"cpu_offload": True, "reshard_after_forward": False}, marks=FULL)


@on_ranks(in_full(1), 2, in_full(3))
@pytest.mark.parametrize("frozen", FROZEN, ids=str)
@pytest.mark.parametrize("kwargs", [{}, OFFLOAD], ids=str)
def test_frozen_weights_around_a_trainable_unit(kwargs, frozen):
    """Frozen weights stay gathered until gradients have reached the inner unit, whether it depends on the input or not.

    Inputs: a leaf with a gradient, a tensor computed from it, a constant, and the leaf of a reentrant checkpoint.
    """
    inputs = {
        "leaf": lambda model, x: model(x),
        "computed": lambda model, x: model(x * 2),
        "constant": lambda model, x: model(x.detach()),
        "reentrant": lambda model, x: checkpoint(model, x * 2, use_reentrant=True),
    }

    def wrap(model):
        model.inner = FSDP(model.inner, **kwargs)
        return FSDP(model, **kwargs)

    for takes, call in itertools.product(("nothing", "detached", "input"), inputs.values()):
        plain = Around(takes, frozen).to(rank_device())
        wrapped = wrap(copy.deepcopy(plain))
        for _ in range(2):
            of_inputs = []
            for model in (plain, wrapped):
                model.zero_grad()
                x = randn(3, 4).requires_grad_()
                y = call(model, x)
                if y.requires_grad:
                    y.square().sum().backward()
                of_inputs.append(torch.zeros_like(x) if x.grad is None else x.grad)
            assert torch.equal(*of_inputs)
            average_grads_(plain.parameters())
            with FSDP.summon_full_params(wrapped, with_grads=True):
                for param, other in zip(plain.parameters(), wrapped.parameters(), strict=True):
                    grad = torch.zeros_like(param) if other.grad is None else other.grad
                    assert not param.requires_grad or torch.equal(param.grad, grad), takes
            assert not any(unit.is_gathered for _, unit in units_below(wrapped))


@on_ranks(2)
@pytest.mark.parametrize("checkpointing", [None, "reentrant"])
def test_frozen_units_are_freed_on_the_way(checkpointing):
    """A unit whose gradients are done is freed without waiting for others: at most it and the next one are gathered."""
    wrapped = wrap_each(frozen_mlp(0, 2, 4))
    units = [unit for _, unit in units_below(wrapped)][1:]
    gathered = []

    def count(x):
        if x.requires_grad:
            x.register_hook(lambda _: gathered.append(sum(unit.is_gathered for unit in units)))

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([wrapped.module[index] for index in (0, 2, 4)])

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x) if checkpointing is None else checkpoint(layer, x, use_reentrant=True))
                count(x)
            return x

    model = FSDP(Chain())
    for _ in range(2):
        model(randn(3, 4).requires_grad_() * 1).square().sum().backward()
    assert len(gathered) == 6
    assert max(gathered) <= 2


@on_ranks(2)
def test_freezing_a_flat_parameter_later():
    """Freezing or unfreezing a flat parameter takes effect at the next forward."""
    plain = mlp(4, 9, 5)
    wrapped = wrap_each(copy.deepcopy(plain))
    for step, trainable in enumerate((True, False, True)):
        wrapped[0].params[0].requires_grad_(trainable)
        plain[0].requires_grad_(trainable)
        for one in (plain, wrapped):
            one.zero_grad()
            loss_of(one, step).backward()
        average_grads_(plain.parameters())
        assert (wrapped[0].params[0].grad is not None) == trainable
        for one in (plain, wrapped):
            sgd(one).step()
    assert_same_state(wrapped.state_dict(), plain.state_dict())


@on_ranks(2)
def test_freezing_an_original_parameter_later_is_refused():
    """After wrapping, ``requires_grad_`` on an original parameter raises at the next forward, with its name."""
    layer = nn.Linear(4, 5)
    weight = layer.weight
    wrapped = FSDP(layer)
    weight.requires_grad_(False)
    with pytest.raises(FairshardError, match=r"requires_grad.*weight"):
        wrapped(randn(3, 4))
