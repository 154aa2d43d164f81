"""`parameters()` yields whole parameters while a module computes or is unsharded by hand, and DTensors otherwise."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from fairshard.errors import StaleOptimizerError
from fairshard.nn import fully_shard
from tests.kit.doors import whole
from tests.models import mlp
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn, sgd
from tests.torch_gaps import needs_fsdp2_on_cpu

pytestmark = pytest.mark.behaviour("whole parameters of fully_shard")

WHOLE, CUT = "whole", "cut"


def sharded(engine=fully_shard, **how):
    """Three layers of odd sizes, of which the first is a unit of its own and the second a list of one."""
    model = mlp(4, 5, 3, 1)
    engine(model[0], **how)
    engine([model[2]], **how)
    return engine(model)


def shown(model):
    """What `parameters()` yields of each layer."""
    kinds = {}
    for name, param in model.named_parameters():
        kinds.setdefault(name.partition(".")[0], set()).add(CUT if isinstance(param, DTensor) else WHOLE)
    return [kind for each in kinds.values() for kind in each]


def kinds_through_a_step(engine, **how):
    """What is shown at each point of a step, gathers by hand included."""
    model = sharded(engine, **how)
    model(randn(3, 4)).sum().backward()  # now the outermost module is known: setting it up frees inner ones
    seen = {"start": shown(model)}
    model[0].unshard()
    seen["unshard"] = shown(model)
    handle = model.unshard(async_op=True)
    seen["before the wait"] = shown(model)
    handle.wait()
    seen["after the wait"] = shown(model)
    model[0].reshard()
    seen["reshard"] = shown(model)
    model[3].register_forward_hook(lambda *_: seen.update({"inside": shown(model)}))
    loss = model(randn(3, 4)).square().sum()
    seen["after the forward"] = shown(model)
    loss.backward()
    seen["after the backward"] = shown(model)
    loss = model(randn(3, 4)).square().sum()
    model.state_dict()
    seen["after a state dict"] = shown(model)
    return seen


@needs_fsdp2_on_cpu
@on_ranks(1, 2)
@pytest.mark.parametrize("reshard", [True, False])
def test_in_every_state_as_pytorch_does(reshard):
    """Whole after ``unshard`` and inside of calls; DTensors otherwise, also of units that a forward leaves gathered.

    Where PyTorch shows whole parameters of units between their forward and their backward, an optimizer that is made
    there trains nothing.
    """
    ours = kinds_through_a_step(fully_shard, reshard_after_forward=reshard)
    theirs = kinds_through_a_step(torch_fully_shard, reshard_after_forward=reshard)
    for point in ("after the forward", "after a state dict"):
        assert ours.pop(point) == [CUT] * 3
        theirs.pop(point)
    if not reshard:
        assert ours.pop("inside") == [CUT, CUT, WHOLE]
        theirs.pop("inside")
    assert ours == theirs


@on_ranks(2)
def test_gradients_are_zeroed_between_forward_and_backward():
    """``model.zero_grad()`` there drops the gradients of the DTensors, which `parameters()` yields."""
    model = sharded(reshard_after_forward=False)
    grads = []
    for _ in range(2):
        loss = model(randn(3, 4)).square().sum()
        model.zero_grad()
        assert shown(model) == [CUT] * 3
        loss.backward()
        grads.append([param.grad.full_tensor() for param in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


@on_ranks(2)
def test_state_dicts_copies_and_outer_units_while_whole():
    """State dicts hold and load DTensors, of an inner module too; copies and outer units take the shards."""
    model = sharded()
    more = {name: value + 1 for name, value in whole(model).items()}
    for state_dict in (model.state_dict, nn.Sequential(model).state_dict, model[4].state_dict):
        model.unshard()
        assert all(isinstance(value, DTensor) for value in state_dict().values())
    model.unshard()
    model[0].unshard()
    model.load_state_dict(more)
    assert_same_state(whole(model), more)
    model.unshard()
    assert_same_state(whole(copy.deepcopy(model)), more)
    inner = fully_shard(mlp(4, 5))
    inner.unshard()
    outer = fully_shard(nn.Sequential(inner, nn.Linear(5, 2)))
    assert shown(outer) == [CUT, CUT]
    optimizer = sgd(outer)
    outer(randn(3, 4)).square().sum().backward()
    optimizer.step()
    assert all(param.grad is not None for param in outer.parameters())


@on_ranks(2)
def test_an_optimizer_of_whole_parameters_is_refused():
    """Whole parameters are freed before a step: an optimizer built from them raises at its first step."""
    model = sharded()
    model.unshard()
    optimizer = sgd(model)
    model(randn(3, 4)).square().sum().backward()
    with pytest.raises(StaleOptimizerError, match=r"`4\.weight`.*gathered at that moment .*`reshard\(\)` before"):
        optimizer.step()


@on_ranks(2)
def test_after_an_exception_shards_are_shown():
    """A forward that raises frees what it was given gathered, and the next step works."""
    model = sharded()
    model.unshard()
    model[0].unshard()
    with pytest.raises(RuntimeError, match="shape"):
        model(randn(3, 7))
    assert shown(model)[::2] == [CUT, CUT]
    model(randn(3, 4)).square().sum().backward()
    assert shown(model) == [CUT] * 3
    dist.barrier()
