"""Memory that is freed while another stream may still read it, and parameters that change their device."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fairshard.nn import CPUOffloadPolicy, fully_shard
from fairshard.optim import CPUOptimizer
from tests.models import mlp
from tests.reference import randn
from tests.sim.ranks import on_sim


def linears(**kwargs):
    """A perceptron whose Linears are units of their own."""
    model = mlp(4, 9, 9, 5)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


@on_sim(2)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_hook_that_raises_leaves_no_bucket_behind(seed):
    """The bucket of the unit whose hook has raised is freed only after its reduce-scatter has read it."""
    model = linears()

    def fail(mean):
        raise KeyError("mine")

    model[2].set_all_reduce_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        model(randn(3, 4)).square().sum().backward()
    model[2].set_all_reduce_hook(lambda mean: None)
    model.zero_grad()
    model(randn(3, 4)).square().sum().backward()


@on_sim(2)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_sum_that_waits_for_replicas_is_freed_after_it_is_added(seed):
    """With one rank to a shard, the sum that waits is made on the compute stream and added on the reduce stream."""
    model = linears(mesh=init_device_mesh("sim", (2, 1)), bucket_cap_mb=0)
    inputs = [randn(3, 4, key=key) for key in range(6)]
    for step in range(3):
        for index in range(2):
            model.set_requires_all_reduce(index == 1)
            model(inputs[2 * step + index]).square().sum().backward()
        assert all(param.grad.to_local().isfinite().all() for param in model.parameters())
        model.zero_grad()


@on_sim(2)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_gradient_that_the_user_has_assigned_is_freed_after_it_is_added_to(seed):
    """It is copied on the reduce stream, while the backward takes memory on its own."""
    model, expected = linears(bucket_cap_mb=0), linears(bucket_cap_mb=0)
    for step in range(3):
        for one in (model, expected):
            one(randn(3, 4, key=step)).square().sum().backward()
        for param in model.parameters():
            param.grad = param.grad.clone()
        for one in (model, expected):
            one(randn(3, 4, key=(step, 1))).square().sum().backward()
        for param, other in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(param.grad.to_local(), other.grad.to_local(), rtol=1e-5, atol=1e-5)


@on_sim(2)
def test_a_unit_that_stays_on_the_device_has_parameters_there():
    """With ``offload_fraction``, DTensors and their local tensors are on the device of the shard; they are trained."""
    model = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 5))
    for layer in model:
        fully_shard(layer, offload_policy=CPUOffloadPolicy())
    optimizer = CPUOptimizer(model, torch.optim.SGD, lr=0.1, offload_fraction=0.5)
    assert {param.device.type for param in model.parameters()} == {"cpu", "sim"}
    for param in model.parameters():
        assert param.device == param.to_local().device
    before = [param.to_local().clone() for param in model.parameters()]
    model(randn(3, 4)).square().sum().backward()
    optimizer.step()
    for param, old in zip(model.parameters(), before, strict=True):
        assert param.grad.device == param.device
        assert not torch.equal(param.to_local(), old)
