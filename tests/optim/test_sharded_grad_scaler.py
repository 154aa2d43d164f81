"""ShardedGradScaler keeps one loss scale for all ranks, whichever rank overflows."""

import pickle

import pytest
import torch
import torch.distributed as dist

from fairshard.optim import CPUOptimizer, ShardedGradScaler
from fairshard.params.grads import grads_of
from tests.models import mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import randn, sgd

PLACEMENTS = pytest.mark.parametrize(
    "placement", [{}, {"cpu_offload": True}, {"move_grads_to_cpu": True}], ids=["device", "offload", "master"]
)
HELD = {"cpu_offload": True, "move_grads_to_cpu": False}


def scaled_backward(model, scaler, step, factor=1.0):
    scaler.scale(model(randn(3, 4, key=step)).square().sum() * factor).backward()


@on_ranks(2, 3)
@PLACEMENTS
@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_a_step_is_skipped_on_all_ranks_or_on_none(placement, poison):
    """Only the last rank's loss overflows: no rank steps, and the scale is halved on every one."""
    model = wrap_each(mlp(4, 9, 5), **placement)
    optimizer, scaler = sgd(model), ShardedGradScaler("cpu", init_scale=8.0)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    for step, overflows in enumerate((False, True, False)):
        before = [param.detach().clone() for param in model.parameters()]
        scaled_backward(model, scaler, step, poison if overflows and is_last else 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
        assert set(changed) == {not overflows}
    assert scaler.get_scale() == 4.0


@on_ranks(2)
def test_a_shard_that_overflows_on_one_rank_only_is_seen_by_all():
    """An overflow in an element that only one rank owns makes both ranks skip the step."""
    model = wrap_each(mlp(4, 9, 5))
    optimizer, scaler = sgd(model), ShardedGradScaler("cpu", init_scale=8.0)
    scaled_backward(model, scaler, 0)
    if dist.get_rank() == 1:
        model[0].params[0].grad[0] = float("inf")
    before = [param.detach().clone() for param in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert scaler.get_scale() == 4.0


@on_ranks(2)
@pytest.mark.parametrize("held", [False, True])
def test_gradients_are_unscaled_where_they_are(held):
    """After `unscale_` gradients are those of the unscaled loss, bit for bit: the scale is a power of two."""
    model, reference = wrap_each(mlp(4, 9, 5), **(HELD if held else {})), wrap_each(mlp(4, 9, 5))
    optimizer = CPUOptimizer(model, torch.optim.SGD, lr=0.1) if held else sgd(model)
    scaler = ShardedGradScaler("cpu", init_scale=2.0**10)
    scaled_backward(model, scaler, 0)
    reference(randn(3, 4, key=0)).square().sum().backward()
    scaler.unscale_(optimizer)
    for one, other in ((model[0], reference[0]), (model[2], reference[2])):
        (grad,) = grads_of(one._unit.flat_params).values()
        assert torch.equal(grad, other.params[0].grad)


@on_ranks(2)
def test_a_rank_without_gradients_takes_part():
    """A rank with nothing to unscale still takes part: it does not hang, and another rank's overflow counts."""
    model = wrap_each(mlp(4, 9, 5))
    optimizer, scaler = sgd(model), ShardedGradScaler("cpu", init_scale=8.0)
    scaled_backward(model, scaler, 0, float("inf"))
    if dist.get_rank() == 0:
        model.zero_grad()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0


@on_ranks(1)
def test_it_grows_backs_off_and_remembers_as_torchs_does():
    """The scale grows after ``growth_interval`` good steps and shrinks on overflow; lists are scaled; state loads."""
    model = wrap_each(mlp(4, 5))
    optimizer = sgd(model, lr=0.0)
    scaler = ShardedGradScaler("cpu", init_scale=8.0, backoff_factor=0.25, growth_factor=4.0, growth_interval=2)
    scales = []
    for step, factor in enumerate((1.0, 1.0, float("inf"), 1.0)):
        scaled_backward(model, scaler, step, factor)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales == [8.0, 32.0, 8.0, 8.0]
    other = ShardedGradScaler("cpu")
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale() == 8.0
    assert pickle.loads(pickle.dumps(scaler)).get_scale() == 8.0
    first, second = scaler.scale([torch.ones(2), torch.ones(())])
    assert first.tolist() == [8.0, 8.0]
    assert second.item() == 8.0


@on_ranks(1)
def test_wrong_use_is_an_error_with_the_cure():
    """Stepping twice without ``update``, or with a closure, raises with the cure."""
    model = wrap_each(mlp(4, 5))
    optimizer, scaler = sgd(model), ShardedGradScaler("cpu", init_scale=8.0)
    scaled_backward(model, scaler, 0)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"followed by scaler.update\(\)"):
        scaler.step(optimizer)
    scaler.update()
    with pytest.raises(RuntimeError, match="must not be given a closure"):
        scaler.step(optimizer, closure=lambda: None)
