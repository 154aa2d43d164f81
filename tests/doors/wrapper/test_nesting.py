"""In nested units each parameter belongs to the innermost wrapper around it, at any depth."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.engine.tree import units_below
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.models import Block, loss_of_tiny, mlp, tiny, wrap_each, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn, train_alike


def sum_of_squares(model, key):
    return model(randn(3, 4, key=key)).square().sum()


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("wrap", [FSDP, wrap_each], ids=["one", "each"])
def test_one_unit_or_many(wrap):
    """A model as one unit, or with every layer as its own unit, trains as the plain model."""
    train_alike(mlp(4, 9, 7, 5), wrap, sum_of_squares)


@on_ranks(1, 2, 3)
def test_units_in_units():
    """Units nested three deep, next to parameters that only the root has, train as the plain model."""
    train_alike(tiny(), wrap_tiny, loss_of_tiny)


@on_ranks(2)
def test_an_outer_wrapper_owns_the_remaining_parameters():
    """The inner wrapper owns its parameters and the outer one the rest; no parameter is owned twice."""
    model = nn.Sequential(nn.Linear(4, 6), FSDP(nn.Linear(6, 3)), nn.Linear(3, 2))
    model = FSDP(model)
    own = {fqn: sum(fp.line.layout.numel for fp in unit.flat_params) for fqn, unit in units_below(model)}
    assert own == {"": (4 * 6 + 6) + (3 * 2 + 2), "1": 6 * 3 + 3}
    assert [name for name, _ in model.named_parameters()] == ["flat_param_0", "1.flat_param_0"]


@on_ranks(2)
def test_wrappers_around_wrappers():
    """A wrapper whose module is itself a wrapper owns nothing and changes nothing."""
    train_alike(mlp(4, 9), lambda model: FSDP(FSDP(FSDP(model))), sum_of_squares)


@on_ranks(1, 2)
def test_modules_without_parameters():
    """A unit without parameters, alone or between others, computes and passes gradients through."""

    def wrap(model):
        return FSDP(nn.Sequential(FSDP(nn.Tanh()), model[0], FSDP(nn.Sequential()), FSDP(nn.Tanh())))

    plain = nn.Sequential(nn.Tanh(), mlp(4, 5)[0], nn.Sequential(), nn.Tanh())
    wrapped = wrap([copy_of(plain[1])])
    x, y = randn(3, 4).requires_grad_(), randn(3, 4).requires_grad_()
    plain(x).sum().backward()
    wrapped(y).sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert torch.equal(FSDP(nn.Tanh())(x), torch.tanh(x))


def copy_of(layer):
    copied = nn.Linear(layer.in_features, layer.out_features, device=layer.weight.device)
    copied.load_state_dict(layer.state_dict())
    return copied


@on_ranks(2)
def test_units_in_containers():
    """Units in a ModuleList and a ModuleDict train as the plain model; their caller has parameters of its own."""

    class Model(nn.Module):
        def __init__(self, wrap):
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

    plain = Model(lambda module: module)
    wrapped = FSDP(Model(FSDP))
    assert_same_state(wrapped.state_dict(), plain.state_dict())
    for one in (plain, wrapped):
        one(randn(2, 4)).sum().backward()
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    optimizer.step()
    with torch.no_grad():
        for param in plain.parameters():
            parts = [torch.empty_like(param.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, param.grad)
            param.sub_(sum(parts) / len(parts), alpha=0.1)
    assert_same_state(wrapped.state_dict(), plain.state_dict(), rtol=0, atol=0)


@on_ranks(2)
def test_an_inner_unit_may_be_called_alone():
    """A unit of a larger model may be called alone, and its gradients are reduced."""
    plain = mlp(4, 9, 5)
    model = wrap_each(mlp(4, 9, 5))
    x = randn(3, 4)
    model(x).sum().backward()
    model.zero_grad()
    inner = model[0]
    assert torch.equal(inner(x), plain[0](x))
    inner(x).sum().backward()
    assert inner.params[0].grad is not None
    assert model[2].params[0].grad is None


@on_ranks(2)
def test_an_inner_unit_used_before_there_was_an_outer_one():
    """A wrapper that has run on its own may become part of a larger one."""
    layer = mlp(4, 5)[0]
    plain = nn.Sequential(copy_of(layer), nn.Tanh())
    inner = FSDP(layer)
    inner(randn(3, 4)).sum().backward()
    inner.zero_grad()
    wrapped = FSDP(nn.Sequential(inner, nn.Tanh()))
    assert torch.equal(wrapped(randn(3, 4)), plain(randn(3, 4)))
    wrapped(randn(3, 4)).sum().backward()
    assert inner.params[0].grad is not None


@on_ranks(2)
def test_a_wrapped_model_inside_a_plain_module():
    """Two wrapped models in a plain module are two roots; both train."""

    class Pair(nn.Module):
        def __init__(self, wrap):
            super().__init__()
            self.left, self.right = wrap(mlp(4, 5, seed=1)), wrap(mlp(5, 3, seed=2))

        def forward(self, x):
            return self.right(torch.tanh(self.left(x)))

    plain, wrapped = Pair(lambda module: module), Pair(FSDP)
    for _ in range(2):
        expected, actual = plain(randn(3, 4)).sum(), wrapped(randn(3, 4)).sum()
        assert torch.equal(actual, expected)
        actual.backward()
    for side in (wrapped.left, wrapped.right):
        assert side.params[0].grad is not None
        side.assert_state(side.training_state.IDLE)
