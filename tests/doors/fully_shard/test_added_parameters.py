"""Parameters added to a model after sharding are refused by name, never trained on each rank separately."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.func import functional_call

from fairshard.errors import FairshardError
from fairshard.nn import fully_shard
from tests.doors.fully_shard.beside import train_beside
from tests.kit import rank_device
from tests.models import mlp
from tests.on_ranks import on_ranks
from tests.reference import randn


def shard(model):
    """Shard the first Linear as one unit and the rest as another."""
    fully_shard(model[0])
    return fully_shard(model)


def parameter(*shape):
    return nn.Parameter(torch.ones(*shape, device=rank_device()))


@on_ranks(2)
@pytest.mark.parametrize("has_run", [False, True])
def test_new_names_are_refused(has_run):
    """A parameter added to a sharded module, or to a module with parameters in its unit, raises at the next forward."""
    model = shard(mlp(4, 6, 4))
    if has_run:
        model(randn(2, 4))
    for target, fqn in ((model, "scale"), (model[0], r"0\.scale"), (model[2], r"2\.scale")):
        for add in (lambda m: setattr(m, "scale", parameter(4)), lambda m: m.register_parameter("scale", parameter(4))):
            add(target)
            for _ in range(2):
                with pytest.raises(FairshardError, match=f"`{fqn}`.* was added later"):
                    model(randn(2, 4))
            del target.scale
    model(randn(2, 4)).sum().backward()


@on_ranks(2)
@pytest.mark.parametrize("has_run", [False, True])
def test_new_submodules_are_refused(has_run):
    """A new submodule raises at the next forward, unless it is sharded or has no parameters."""
    model = shard(mlp(4, 6, 4))
    x = randn(2, 4)
    if has_run:
        model(x)
    model.append(nn.Linear(4, 4))
    with pytest.raises(FairshardError, match=r"`3\.weight`"):
        model(x)
    del model[3]
    model.adapter = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(FairshardError, match=r"`adapter\.0\.weight`"):
        model(x)
    fully_shard(model.adapter)
    model.act = nn.ReLU()
    model(x).sum().backward()


@on_ranks(2)
def test_found_at_the_first_forward():
    """A parameter added to a module that had none is found at the first forward."""
    model = shard(mlp(4, 6, 4))
    model[1].slope = parameter(1)
    for _ in range(2):
        with pytest.raises(FairshardError, match=r"`1\.slope`.*each rank would train its own copy"):
            model(randn(2, 4))
    del model[1].slope
    model(randn(2, 4))


@on_ranks(2)
@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize(("index", "fqn"), [(0, r"0\.weight"), (2, r"2\.weight")])
def test_a_whole_parameter_in_the_place_of_a_dtensor(has_run, index, fqn):
    """A plain parameter assigned over a DTensor raises in the backward that would train it; put back, all is well."""
    model = shard(mlp(4, 6, 4))
    if has_run:
        model(randn(2, 4)).sum().backward()
    old = model[index].weight
    model[index].weight = nn.Parameter(torch.zeros(old.shape, device=rank_device()))
    for _ in range(2):
        with pytest.raises(FairshardError, match=f"`{fqn}` must stay a DTensor"):
            model(randn(2, 4)).sum().backward()
    model[index].weight = old
    model(randn(2, 4)).sum().backward()


@on_ranks(2)
@pytest.mark.parametrize("has_run", [False, True])
def test_a_dtensor_in_the_place_of_a_dtensor(has_run):
    """A DTensor assigned over a sharded parameter raises at the next forward; put back, all is well."""
    model = shard(mlp(4, 6, 4))
    if has_run:
        model(randn(2, 4)).sum().backward()
    for module, fqn in ((model[0], r"0\.weight"), (model[2], r"2\.weight")):
        old = module.weight
        values = randn(*old.shape)
        torch.distributed.broadcast(values, 0)
        module.weight = nn.Parameter(distribute_tensor(values, old.device_mesh, [Shard(0)]))
        for _ in range(2):
            with pytest.raises(FairshardError, match=f"`{fqn}` was added later.*copy them into it"):
                model(randn(2, 4))
        module.weight = old
    model(randn(2, 4)).sum().backward()


@on_ranks(2)
@pytest.mark.parametrize("has_run", [False, True])
def test_weights_are_not_tied_after_sharding(has_run):
    """Assigning a sharded parameter to the place of another one cannot tie them: the next forward raises."""
    model = shard(mlp(6, 6, 6))
    if has_run:
        model(randn(2, 6)).sum().backward()
    old = model[2].weight
    model[2].weight = model[0].weight
    with pytest.raises(FairshardError, match=r"`0\.weight` was assigned to `2\.weight`.*Tie them before"):
        model(randn(2, 6))
    model[2].weight = old
    model(randn(2, 6)).sum().backward()


@on_ranks(2)
@pytest.mark.parametrize("has_run", [False, True])
def test_functional_call(has_run):
    """Tensors given to ``functional_call`` replace parameters for one call, even the first, and get its gradients."""
    plain = mlp(4, 6, 4)
    model = shard(copy.deepcopy(plain))
    if has_run:
        model(randn(2, 4)).sum().backward()
        model.zero_grad()
    for kind in (lambda value: value, nn.Parameter):
        given = {name: kind(torch.full_like(value, 0.5)) for name, value in plain.named_parameters()}
        weight = given["0.weight"].requires_grad_()
        found = functional_call(model, given, (randn(2, 4),))
        assert torch.equal(found, functional_call(plain, given, (randn(2, 4),)))
        found.sum().backward()
        assert weight.grad is not None
    assert torch.equal(model(randn(2, 4)), plain(randn(2, 4)))


@on_ranks(2)
def test_sharded_modules_may_be_added_and_removed():
    """A model that has run still trains after a sharded module is added to it, and after a unit is removed."""
    plain = mlp(4, 6, 4)
    model = shard(copy.deepcopy(plain))
    model(randn(2, 4)).sum().backward()
    model.zero_grad()
    torch.manual_seed(5)
    added = nn.Linear(4, 4).to(rank_device())
    for net in (plain, model):
        net.append(copy.deepcopy(added) if net is plain else fully_shard(copy.deepcopy(added)))
    for without in (False, True):
        if without:
            for net in (plain, model):
                net[0] = nn.ZeroPad1d((0, 2))
        train_beside(model, plain)
