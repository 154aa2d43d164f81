"""Weights and gradients that users put in place of DTensors' are used, or an error is raised."""

import copy
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fairshard.errors import FairshardError, ShardChangedError
from fairshard.nn import fully_shard
from fairshard.views.shown_dtensors import _Wrapper
from tests.kit import rank_device
from tests.kit.doors import both_apis, shard, whole_grads
from tests.models import mlp
from tests.on_ranks import on_ranks
from tests.reference import average_grads_, randn, sgd, squares

pytestmark = pytest.mark.behaviour("changed weights of fully_shard")


def linears():
    return shard(mlp(4, 6, 4), "fully_shard", "0", "2")


@on_ranks(2)
@both_apis
def test_a_backward_through_two_forwards_with_a_step_between_is_refused(door):
    """Each forward records the weights that it used; only a backward through the last one is allowed after a step."""
    model = shard(mlp(4, 6, 4), door, "0", "2")
    optimizer = sgd(model)

    def first_and_second():
        first = squares(model, 1)
        first.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        return first, squares(model, 2)

    first, second = first_and_second()
    second.backward()
    optimizer.zero_grad()
    first, second = first_and_second()
    with pytest.raises(ShardChangedError, match="must not change between its forward and its backward"):
        (first + second).backward()
    optimizer.zero_grad()
    squares(model, 3).backward()


@on_ranks(2)
def test_gradients_that_users_put_there():
    """A gradient that the user assigns, placed like its parameter, adds up with those of the next backward."""
    plain, model = mlp(4, 6, 4), linears()
    weight, bias = model[2].weight, model[2].bias
    put = torch.arange(24.0, device=rank_device()).view(4, 6), torch.arange(4.0, device=rank_device())
    for net in (model, plain):
        squares(net, 1).backward()
    average_grads_(plain.parameters())
    plain[2].weight.grad, plain[2].bias.grad = put
    before = [param.grad for param in plain.parameters()]
    weight.grad = distribute_tensor(put[0], weight.device_mesh, weight.placements)
    bias.grad = distribute_tensor(put[1], bias.device_mesh, bias.placements)
    plain.zero_grad()
    for net in (model, plain):
        squares(net, 2).backward()
    average_grads_(plain.parameters())
    for grad, param, old in zip(whole_grads(model).values(), plain.parameters(), before, strict=True):
        assert torch.equal(grad, old + param.grad)


@on_ranks(2)
def test_gradients_placed_otherwise_are_refused():
    """A gradient placed unlike its parameter holds other elements and is refused, even if their number is the same."""
    model = linears()
    weight = model[2].weight
    for placement in (Shard(1), Replicate(), Partial()):
        given = torch.ones(4, 6, device=rank_device())
        local = given[:, : 6 // weight.device_mesh.size()] if placement == Shard(1) else given
        weight.grad = DTensor.from_local(local, weight.device_mesh, [placement], run_check=False)
        with pytest.raises(ValueError, match=r"must be placed like its parameter, but that of `2\.weight`"):
            squares(model).backward()
        model.zero_grad()
        squares(model).backward()


@on_ranks(2)
@pytest.mark.parametrize("seen_by", ["first forward", "forward", "state dict"])
def test_data_assigned_to_dtensors_is_refused(seen_by):
    """``param.data = tensor`` changes nothing in a DTensor: it raises by name, once, and copying works."""
    plain, model, x = mlp(4, 6, 4), linears(), randn(3, 4)
    look = model.state_dict if seen_by == "state dict" else lambda: model(x)
    with torch.no_grad():
        if seen_by == "forward":
            model(x)
        zeros = torch.zeros_like(model[2].weight)
        model[2].weight.data = zeros
        with pytest.raises(FairshardError, match=r"must not be assigned to `.data` of a DTensor.*`2\.weight`. Copy"):
            [look() for _ in model.parameters()]  # a forward looks at one parameter of each unit
        assert torch.equal(model(x), plain(x))
        model[2].weight.copy_(zeros)
        assert torch.equal(model(x), plain[2].bias.expand(3, 4))


@on_ranks(2)
def test_conversions_of_submodules_are_not_refused():
    """`module.to` swaps DTensors for others, which a later forward, state dict and assignment see as they are."""
    plain, x = mlp(4, 6, 4), randn(3, 4)
    model = fully_shard(copy.deepcopy(plain))
    model(x).sum().backward()
    for _ in range(2):
        model[2].to(rank_device())
        for _ in model.parameters():
            with torch.no_grad():
                assert torch.equal(model(x), plain(x))
        model.state_dict()
    model[2].weight.data = torch.zeros_like(model[2].weight)
    with pytest.raises(FairshardError, match=r"`2\.weight`"):
        model.state_dict()


@on_ranks(2)
def test_a_state_dict_looks_at_each_parameter_once():
    """Its host time grows with the number of parameters, not with its square."""
    model, looks = fully_shard(mlp(*[2] * 6)), []
    is_assigned = _Wrapper.is_assigned

    def count(watched, param):
        looks.append(param)
        return is_assigned(watched, param)

    with mock.patch.object(_Wrapper, "is_assigned", count):
        model.state_dict()
    assert len(looks) == len(list(model.parameters()))
