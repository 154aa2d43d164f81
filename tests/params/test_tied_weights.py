"""A weight with several names is one parameter: gathered once, its gradients added, saved under all names."""

import copy
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fairshard.engine.tree import units_below
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import fully_shard
from tests.kit import rank_device
from tests.on_ranks import on_ranks
from tests.reference import randn, train_alike


class Tied(nn.Module):
    """Two Linears that share a weight, and a third that shares a bias with them."""

    def __init__(self, hidden=4):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(hidden, hidden)
        self.second = nn.Linear(hidden, hidden, bias=False)
        self.second.weight = self.first.weight
        self.third = nn.Linear(hidden, hidden)
        self.third.bias = self.first.bias

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def loss_of(model, key):
    return model(randn(3, 4, key=key)).square().sum()


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("flatten", [True, False])
def test_tied_weights_stay_tied(flatten):
    """Training gives the plain model's weights: the gradient is the sum over all uses."""
    wrapped = train_alike(Tied().to(rank_device()), lambda model: FSDP(model, flatten_parameters=flatten), loss_of)
    state = wrapped.state_dict()
    assert torch.equal(state["first.weight"], state["second.weight"])
    assert torch.equal(state["first.bias"], state["third.bias"])


@on_ranks(2)
@pytest.mark.parametrize("flatten", [True, False])
def test_a_tied_weight_is_stored_once(flatten):
    """The shard holds each element once, and ``parameters()`` yields it once."""
    wrapped = FSDP(Tied(), flatten_parameters=flatten)
    numel = 4 * 4 + 4 + 4 * 4
    assert sum(fp.line.layout.numel for _, unit in units_below(wrapped) for fp in unit.flat_params) == numel
    assert sum(param.numel() for param in wrapped.parameters()) == numel // 2


@on_ranks(2)
def test_inside_a_forward_both_names_are_one_tensor():
    """While the unit computes, the modules see the very same Parameter under both names."""
    seen = []
    model = Tied()
    model.register_forward_pre_hook(lambda module, _: seen.append(module.first.weight is module.second.weight))
    FSDP(model)(randn(3, 4))
    assert seen == [True]


@on_ranks(2)
def test_a_weight_shared_with_an_inner_unit_is_refused():
    """A weight shared with an inner unit raises, naming both places: tied weights must be in one unit."""
    model = Tied()
    model.first = FSDP(model.first)
    with pytest.raises(ValueError, match=r"`second\.weight` is shared with `first\.weight`"):
        FSDP(model)
    model = Tied()
    fully_shard([model.first, model.third])
    with pytest.raises(ValueError, match=r"`second\.weight` is shared with `first\.weight`"):
        fully_shard(model)


@on_ranks(2)
@pytest.mark.parametrize("flatten", [True, False])
def test_a_weight_shared_with_a_unit_beside_is_refused(flatten):
    """Sharding a tied weight twice, also in a copy, raises with the cure: the other module has an empty leaf."""
    model = Tied()
    model.first = FSDP(model.first, flatten_parameters=flatten)
    for tied in (model, copy.deepcopy(model)):
        with pytest.raises(ValueError, match=r"`third\.bias` is shared with `bias` of a unit that is sharded already"):
            FSDP(nn.Sequential(OrderedDict({"third": tied.third})), flatten_parameters=flatten)
        with pytest.raises(ValueError, match=r"`weight` is shared with `weight`.*Put one wrapper around both"):
            FSDP(tied.second, flatten_parameters=flatten)
        with pytest.raises(ValueError, match=r"`second\.weight` is shared with `first\.weight`.*Put one wrapper"):
            FSDP(nn.Sequential(OrderedDict({"first": tied.first, "second": tied.second})))


@on_ranks(2)
def test_a_module_registered_twice():
    """A module with two names is sharded once, and its state has both names."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.one = nn.Linear(4, 4)
            self.two = self.one

        def forward(self, x):
            return self.two(F.relu(self.one(x)))

    wrapped = train_alike(Twice().to(rank_device()), FSDP, loss_of)
    assert list(wrapped.state_dict()) == ["one.weight", "one.bias", "two.weight", "two.bias"]
