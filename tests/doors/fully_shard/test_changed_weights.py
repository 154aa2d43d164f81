"""When weights change unexpectedly, results use the weights of before or after the change, or an error is raised."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fairshard.errors import FairshardError, ShardChangedError
from fairshard.nn import FullyShardedDataParallel, fully_shard
from fairshard.views.shown_dtensors import _Wrapper
from tests.kit import rank_device
from tests.on_ranks import in_full, on_ranks
from tests.reference import average_grads_, await_device, randn, sgd


def plain_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).to(rank_device())


def in_place(model):
    fully_shard(model[0])
    fully_shard(model[2])
    return fully_shard(model)


def assert_same_grads(model, plain):
    average_grads_(plain.parameters())
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.grad.full_tensor(), expected.grad)


@on_ranks(in_full(1), 2)
def test_gathers_under_way_are_waited_for_before_they_are_repeated():
    """A gather in flight is waited for before it is repeated; mixed messages would hang the next collective."""
    plain = plain_model()
    model = in_place(copy.deepcopy(plain))
    for step in range(4):
        handles = [module.unshard(async_op=True) for module in (model, model[0], model[2])]
        await_device()  # a gather reads the shards that change now
        with torch.no_grad():
            for param in (*model.parameters(), *plain.parameters()):
                param.mul_(1.5)
        x = randn(3, 4, key=step)
        assert torch.equal(model(x), plain(x))
        for handle in handles:
            handle.wait()
    for net in (model, plain):
        net(x).square().sum().backward()
    assert_same_grads(model, plain)


@on_ranks(in_full(1), 2)
@pytest.mark.parametrize("door", [in_place, FullyShardedDataParallel])
def test_a_backward_through_two_forwards_with_a_step_between_is_refused(door):
    """Each forward records the weights that it used; only a backward through the last one is allowed after a step."""
    plain = plain_model()
    model = door(copy.deepcopy(plain))
    optimizer = sgd(model)

    def first_and_second():
        first = model(randn(3, 4, key=1)).sum()
        first.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        return first, model(randn(3, 4, key=2)).sum()

    first, second = first_and_second()
    second.backward()
    optimizer.zero_grad()
    first, second = first_and_second()
    with pytest.raises(ShardChangedError, match="must not change between its forward and its backward"):
        (first + second).backward()
    optimizer.zero_grad()
    model(randn(3, 4, key=3)).sum().backward()


@on_ranks(in_full(1), 2)
def test_gradients_that_users_put_there():
    """A gradient that the user assigns, placed like its parameter, adds up with those of the next backward."""
    plain = plain_model()
    model = in_place(copy.deepcopy(plain))
    weight, bias = model[2].weight, model[2].bias
    put = torch.arange(24.0, device=rank_device()).view(4, 6), torch.arange(4.0, device=rank_device())
    for net in (model, plain):
        net(randn(3, 4, key=1)).square().sum().backward()
    average_grads_(plain.parameters())
    plain[2].weight.grad, plain[2].bias.grad = put
    expected = [param.grad.clone() for param in plain.parameters()]
    weight.grad = distribute_tensor(put[0], weight.device_mesh, weight.placements)
    bias.grad = distribute_tensor(put[1], bias.device_mesh, bias.placements)
    plain.zero_grad()
    for net in (model, plain):
        net(randn(3, 4, key=2)).square().sum().backward()
    average_grads_(plain.parameters())
    for param, other, before in zip(model.parameters(), plain.parameters(), expected, strict=True):
        assert torch.equal(param.grad.full_tensor(), before + other.grad)


@on_ranks(in_full(1), 2)
def test_gradients_placed_otherwise_are_refused():
    """A gradient placed unlike its parameter holds other elements and is refused, even if their number is the same."""
    model = in_place(plain_model())
    weight = model[2].weight
    for placement in (Shard(1), Replicate(), Partial()):
        whole = torch.ones(4, 6, device=rank_device())
        local = whole[:, : 6 // weight.device_mesh.size()] if placement == Shard(1) else whole
        weight.grad = DTensor.from_local(local, weight.device_mesh, [placement], run_check=False)
        with pytest.raises(ValueError, match=r"must be placed like its parameter, but that of `2\.weight`"):
            model(randn(3, 4, key=3)).square().sum().backward()
        model.zero_grad()
        model(randn(3, 4, key=3)).square().sum().backward()


@on_ranks(in_full(1), 2)
@pytest.mark.parametrize("seen_by", ["first forward", "forward", "state dict"])
def test_data_assigned_to_dtensors_is_refused(seen_by):
    """``param.data = tensor`` changes nothing in a DTensor: it raises by name, once, and copying works."""
    plain, x = plain_model(), randn(3, 4)
    model = in_place(copy.deepcopy(plain))
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


@on_ranks(in_full(1), 2)
def test_conversions_of_submodules_are_not_refused():
    """`module.to` swaps DTensors for others, which a later forward, state dict and assignment see as they are."""
    plain, x = plain_model(), randn(3, 4)
    model = fully_shard(copy.deepcopy(plain))
    for net in (model, plain):
        net(x).sum().backward()
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
    model = fully_shard(nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)]))
    looks = []

    def count(watched, param):
        looks.append(param)
        return is_assigned(watched, param)

    is_assigned = _Wrapper.is_assigned
    with mock.patch.object(_Wrapper, "is_assigned", count):
        model.state_dict()
    assert len(looks) == len(list(model.parameters()))
