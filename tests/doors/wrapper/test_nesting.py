"""In nested units each parameter belongs to the innermost wrapper around it, at any depth."""

import pytest
import torch
from torch import nn

from fairshard.engine.tree import units_below
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.models import Block, mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import randn, squares, train_alike, train_both

pytestmark = pytest.mark.behaviour("nesting")


def wrap_thrice(model):
    return FSDP(FSDP(FSDP(model)))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("wrap", [FSDP, wrap_each, wrap_thrice])
def test_one_unit_or_many(wrap):
    """A model as one unit, with every layer as a unit, or with wrappers that own nothing, trains as the plain model."""
    train_alike(mlp(4, 9, 7, 5), wrap, squares)


@on_ranks(2)
def test_an_outer_wrapper_owns_the_remaining_parameters():
    """The inner wrapper owns its parameters and the outer one the rest; no parameter is owned twice."""
    model = FSDP(nn.Sequential(nn.Linear(4, 6), FSDP(nn.Linear(6, 3)), nn.Linear(3, 2)))
    own = {fqn: sum(fp.line.layout.numel for fp in unit.flat_params) for fqn, unit in units_below(model)}
    assert own == {"": (4 * 6 + 6) + (3 * 2 + 2), "1": 6 * 3 + 3}
    assert [name for name, _ in model.named_parameters()] == ["flat_param_0", "1.flat_param_0"]


@on_ranks(1, 2)
def test_modules_without_parameters():
    """A unit without parameters, alone or between others, computes and passes gradients through."""
    plain = nn.Sequential(nn.Tanh(), mlp(4, 5)[0], nn.Sequential(), nn.Tanh())
    model = FSDP(nn.Sequential(FSDP(nn.Tanh()), mlp(4, 5)[0], FSDP(nn.Sequential()), FSDP(nn.Tanh())))
    x, y = randn(3, 4).requires_grad_(), randn(3, 4).requires_grad_()
    plain(x).sum().backward()
    model(y).sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert torch.equal(FSDP(nn.Tanh())(x), torch.tanh(x))


class Contained(nn.Module):
    """Blocks in containers, beside a parameter of their caller."""

    def __init__(self, wrap=lambda module: module):
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList(wrap(Block(4, 3)) for _ in range(3))
        self.heads = nn.ModuleDict({"a": wrap(nn.Linear(4, 2)), "b": wrap(nn.Linear(4, 3))})

    def forward(self, x):
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return torch.cat([self.heads["b"](x), self.heads["a"](x)], dim=-1)


@on_ranks(2)
def test_units_in_containers():
    """Units in a ModuleList and a ModuleDict train as the plain model; their caller has parameters of its own."""
    train_both(Contained(), FSDP(Contained(FSDP)), squares)


@on_ranks(2)
def test_an_inner_unit_may_be_called_alone():
    """A unit of a larger model may be called alone, before there is one and after, and its gradients are reduced."""
    plain, layers = mlp(4, 9, 5), mlp(4, 9, 5)
    inner = layers[0] = FSDP(layers[0])
    for _ in range(2):
        assert torch.equal(inner(randn(3, 4)), plain[0](randn(3, 4)))
        inner(randn(3, 4)).sum().backward()
        assert inner.params[0].grad is not None
        inner.zero_grad()
    model = FSDP(layers)
    for _ in range(2):
        inner(randn(3, 4)).sum().backward()
        assert inner.params[0].grad is not None
        assert model.params[0].grad is None
        model.zero_grad()
        train_both(plain, model, squares)


@on_ranks(2)
def test_wrapped_models_inside_a_plain_module():
    """Two wrapped models in a plain module are two roots; both train."""
    plain = nn.Sequential(mlp(4, 5, seed=1), mlp(5, 3, seed=2))
    model = nn.Sequential(FSDP(mlp(4, 5, seed=1)), FSDP(mlp(5, 3, seed=2)))
    train_both(plain, model, squares)
    for part in model:
        part.assert_state(part.training_state.IDLE)
