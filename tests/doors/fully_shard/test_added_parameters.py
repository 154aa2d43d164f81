"""Parameters added to a model after sharding are refused by name, never trained on each rank separately."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.func import functional_call

from fairshard.errors import FairshardError
from fairshard.nn import fully_shard
from tests.kit import rank_device
from tests.kit.doors import shard
from tests.models import mlp
from tests.on_ranks import on_ranks
from tests.reference import randn, squares, train_both

pytestmark = [pytest.mark.behaviour("added parameters"), pytest.mark.parametrize("has_run", [False, True])]


def sharded(has_run, *widths):
    """The first Linear as one unit and the rest as another."""
    model = shard(mlp(*widths), "fully_shard", "0")
    if has_run:
        model(randn(3, widths[0])).sum().backward()
        model.zero_grad()
    return model


def parameter(*shape):
    return nn.Parameter(torch.ones(*shape, device=rank_device()))


def as_dtensor(like):
    """Another DTensor, placed like ``like``."""
    values = randn(*like.shape)
    torch.distributed.broadcast(values, 0)
    return nn.Parameter(distribute_tensor(values, like.device_mesh, [Shard(0)]))


ADDED = [  # where, its name, what is put there, and words of the error
    ("", "scale", lambda model: parameter(4), "`scale`.* was added later"),
    ("0", "scale", lambda model: parameter(4), r"`0\.scale`.* was added later"),
    ("1", "slope", lambda model: parameter(1), r"`1\.slope`.*each rank would train its own copy"),
    ("2", "scale", lambda model: parameter(4), r"`2\.scale`.* was added later"),
    ("", "3", lambda model: nn.Linear(6, 6), r"`3\.weight`"),
    ("", "adapter", lambda model: nn.Sequential(nn.Linear(4, 4)), r"`adapter\.0\.weight`"),
    ("0", "weight", lambda model: parameter(6, 6), r"`0\.weight` must stay a DTensor"),
    ("2", "weight", lambda model: parameter(6, 6), r"`2\.weight` must stay a DTensor"),
    ("0", "weight", lambda model: as_dtensor(model[0].weight), r"`0\.weight` was added later.*copy them into it"),
    ("2", "weight", lambda model: as_dtensor(model[2].weight), r"`2\.weight` was added later.*copy them into it"),
    ("2", "weight", lambda model: model[0].weight, r"`0\.weight` was assigned to `2\.weight`.*Tie them before"),
]


@on_ranks(2)
def test_what_is_added_or_assigned_is_refused(has_run):
    """Each raises at the next forward, or in the backward that would train it; undone, all is well."""
    for where, name, what, match in ADDED:
        model = sharded(has_run, 6, 6, 6)
        owner = model.get_submodule(where)
        old = getattr(owner, name, None)
        setattr(owner, name, what(model))
        for _ in range(2):
            with pytest.raises(FairshardError, match=match):
                model(randn(2, 6)).sum().backward()
        setattr(owner, name, old) if old is not None else delattr(owner, name)
        model(randn(2, 6)).sum().backward()


@on_ranks(2)
def test_functional_call(has_run):
    """Tensors given to ``functional_call`` replace parameters for one call, even the first, and get its gradients."""
    plain, model = mlp(4, 6, 4), sharded(has_run, 4, 6, 4)
    for kind in (lambda value: value, nn.Parameter):
        given = {name: kind(torch.full_like(value, 0.5)) for name, value in plain.named_parameters()}
        weight = given["0.weight"].requires_grad_()
        found = functional_call(model, given, (randn(2, 4),))
        assert torch.equal(found, functional_call(plain, given, (randn(2, 4),)))
        found.sum().backward()
        assert weight.grad is not None
    assert torch.equal(model(randn(2, 4)), plain(randn(2, 4)))


@on_ranks(2)
def test_sharded_modules_may_be_added_and_removed(has_run):
    """A model still trains after a sharded module, or one without parameters, is added, and after one is removed."""
    plain, model = mlp(4, 6, 4), sharded(has_run, 4, 6, 4)
    model.act = nn.ReLU()
    plain.act = nn.ReLU()
    added = mlp(4, 4, seed=5)[0]
    for net in (plain, model):
        net.append(copy.deepcopy(added) if net is plain else fully_shard(copy.deepcopy(added)))
    train_both(plain, model, squares)
    for net in (plain, model):
        net[0] = nn.ZeroPad1d((0, 2))
    train_both(plain, model, squares)
