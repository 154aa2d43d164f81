"""Parameters that the user replaces for one call, or deletes: what the user has put there counts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import fully_shard
from fairshard.params.slot import ParamSlot
from tests.on_ranks import on_ranks
from tests.reference import randn

DOORS = ["flat", "unflattened", "orig_params", "fully_shard"]


class Layer(nn.Module):
    """A linear layer that may have no bias; both parameters belong to the outermost unit."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.eye(4)), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


def sharded(door):
    """A sharded `Layer`, and its own module."""
    layer = Layer()
    if door == "fully_shard":
        return fully_shard(layer), layer
    return FSDP(layer, flatten_parameters=door != "unflattened", use_orig_params=door == "orig_params"), layer


@on_ranks(1, 2)
@pytest.mark.parametrize("before", ["nothing", "an eval", "a forward", "a step"])
@pytest.mark.parametrize("door", DOORS)
def test_functional_call_of_a_whole_unit(door, before):
    """The call computes with the tensor that replaces the weight, in every state of the unit; later calls do not."""
    model, layer = sharded(door)
    x, weight = randn(3, 4), randn(4, 4, key=1)
    if before != "nothing":
        with torch.set_grad_enabled(before != "an eval"):
            loss = model(x).sum()
        if before == "a step":
            loss.backward()
    path = "weight" if model is layer else "module.weight"
    for _ in range(2):
        replaced = torch.func.functional_call(model, {path: weight}, (x,))
        assert torch.equal(replaced, F.linear(x, weight, torch.ones(4)))
        assert torch.equal(model(x), x + 1)


@on_ranks(1, 2)
@pytest.mark.parametrize("door", DOORS)
def test_a_deleted_parameter_stays_deleted(door):
    """The forward sees what the user has put in its place; so it is after a step, and after `summon_full_params`."""
    model, layer = sharded(door)
    x = randn(3, 4)
    model(x).sum().backward()
    del layer.bias
    layer.bias = None
    for _ in range(2):
        out = model(x)
        assert torch.equal(out, x)
        out.sum().backward()
        assert layer.bias is None
        if door != "fully_shard":
            with FSDP.summon_full_params(model):
                assert layer.bias is None
                assert torch.equal(layer.weight, torch.eye(4))
    with torch.no_grad():
        assert torch.equal(model(x), x)


def test_an_emptied_leaf_has_the_dtype_that_it_showed_last():
    """References to a leaf that other code keeps tell its dtype while it is sharded too."""
    slot = ParamSlot(nn.Parameter(torch.zeros(2, 3)), "weight")
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        for _ in range(2):
            slot.show(torch.zeros(2, 3, dtype=dtype))
            assert slot.leaf.shape == (2, 3)
            slot.clear()
            assert (slot.leaf.dtype, slot.leaf.numel()) == (dtype, 0)


@on_ranks(1)
def test_what_replaces_a_parameter_is_not_hidden():
    """A replaced parameter's placeholder is removed from its module; what the user put there stays."""
    model = FSDP(nn.Sequential(nn.Linear(3, 2)))
    model(randn(2, 3)).sum().backward()
    module, registered = model.module[0], model._unit.registered
    theirs = nn.Parameter(torch.zeros(2, 3))
    module._parameters["weight"] = theirs  # as functional_call does
    registered.swap(to_leaves=True)
    assert module.weight is theirs
    registered.swap(to_leaves=False)
    assert module._parameters["weight"] is theirs
    del module._parameters["weight"]
    module.__dict__["weight"] = "theirs"
    for to_leaves in (True, False):
        registered.swap(to_leaves)
        assert module.weight == "theirs"
