"""torch's clipping and loss scaling over flat shards: right by luck or refused on all ranks, never silently wrong."""

import math
import re

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from fairshard.errors import LocalScalingError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import ShardingStrategy, fully_shard
from fairshard.optim import ShardedGradScaler
from tests.models import mlp, wrap_each
from tests.on_ranks import in_full, on_ranks
from tests.reference import average_grads_, randn, sgd
from tests.waiting import told_about

LAYOUTS = pytest.mark.parametrize(
    "layout",
    [{}, {"use_orig_params": True}, {"flatten_parameters": False}, {"cpu_offload": True}],
    ids=["flat", "orig_params", "unflattened", "offload"],
)


def grads_of(model):
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


def after_backward(model, scaler=None):
    loss = model(randn(3, 4)).square().sum()
    (loss if scaler is None else scaler.scale(loss)).backward()
    return model


@on_ranks(2, in_full(3))
@LAYOUTS
def test_clipping_by_the_norm_of_a_part_raises_on_all_ranks(layout):
    """No rank's gradients have changed, and the error names the method that clips by the whole norm."""
    model = after_backward(wrap_each(mlp(4, 9, 5), **layout))
    before = grads_of(model)
    with pytest.raises(LocalScalingError, match=r"of that rank's part.*model\.clip_grad_norm_"):
        clip_grad_norm_(model.parameters(), 1e-3)
    assert all(torch.equal(old, new) for old, new in zip(before, grads_of(model), strict=True))
    assert model.clip_grad_norm_(1e-3) > 1e-3
    sgd(model).step()


@on_ranks(2)
def test_parts_below_the_limit_raise_too():
    """Whatever the norms of the parts are, also if they are equal: that of the whole may be above the limit."""
    model = after_backward(wrap_each(mlp(4, 9, 5)))
    for param in model.parameters():
        param.grad.fill_(1.0)
    with pytest.raises(LocalScalingError, match=r"model\.clip_grad_norm_"):
        clip_grad_norm_(model.parameters(), 1e9)


@on_ranks(2)
def test_no_rank_waits_for_one_whose_list_is_empty():
    """A list that is empty on a rank is no error there, and no other rank waits for it."""
    model = after_backward(wrap_each(mlp(4, 9, 5), use_orig_params=True))
    own = [param for param in model.parameters() if param.numel() and dist.get_rank()]
    if own:
        with pytest.raises(LocalScalingError):
            clip_grad_norm_(own, 1.0)
    else:
        assert clip_grad_norm_(own, 1.0) == 0


@on_ranks(2)
def test_a_rank_that_waits_for_one_that_raised_is_told_why():
    """A rank whose list is empty continues; when its next collective fails, it names the other rank's error."""
    model = after_backward(wrap_each(mlp(4, 9, 5)))

    def clip():
        with pytest.raises(LocalScalingError):
            clip_grad_norm_(model.parameters(), 1.0)

    place = r"rank 1: after the backward of step 1.* has raised LocalScalingError: .*clip_grad_norm_"
    assert re.search(place, told_about(clip))
    sgd(model).step()
    after_backward(model)


@on_ranks(2)
def test_changes_that_are_equal_on_all_ranks_are_allowed():
    """A norm to be logged, a norm of the user's own, a limit per element, one factor, zeros."""
    model = after_backward(wrap_each(mlp(4, 9, 5)))
    before = grads_of(model)
    square = clip_grad_norm_(model.parameters(), math.inf).square()
    assert all(torch.equal(old, new) for old, new in zip(before, grads_of(model), strict=True))
    dist.all_reduce(square)
    torch.nn.utils.clip_grads_with_norm_(list(model.parameters()), 1.0, square.sqrt())
    factor = 1.0 / (square.sqrt() + 1e-6)
    assert all(torch.equal(old * factor, new) for old, new in zip(before, grads_of(model), strict=True))
    for param in model.parameters():
        param.grad.mul_(0.5)
    clip_grad_value_(model.parameters(), 1e-3)
    sgd(model).step()
    model.zero_grad(set_to_none=False)
    sgd(model).step()


@on_ranks(1, 2)
@pytest.mark.parametrize("door", ["fully_shard", "no_shard"])
def test_whole_gradients_and_dtensors_are_clipped_by_torch(door):
    """torch's function gives what clipping the unsharded model gives: with its own rules for DTensors, or unsharded."""
    whole = mlp(4, 9, 5)
    after_backward(whole)
    average_grads_(whole.parameters())
    norm = clip_grad_norm_(whole.parameters(), 1e-3)
    strategy = ShardingStrategy.NO_SHARD
    model = fully_shard(mlp(4, 9, 5)) if door == "fully_shard" else FSDP(mlp(4, 9, 5), sharding_strategy=strategy)
    found = clip_grad_norm_(after_backward(model).parameters(), 1e-3)
    torch.testing.assert_close(getattr(found, "full_tensor", lambda: found)(), norm)


def scaled(model, scaler, optimizer, overflows):
    """A step whose gradient overflows in an element of rank 1 only, if it ``overflows``."""
    after_backward(model, scaler)
    if overflows and dist.get_rank() == 1:
        next(model.parameters()).grad[0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_would_step_on_one_rank_only_raises_on_all(fused):
    """Up to the overflow it warns; then every rank raises, no rank has stepped, and the cure is named."""
    model = wrap_each(mlp(4, 9, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with pytest.warns(UserWarning, match="ShardedGradScaler"):
        scaled(model, scaler, optimizer, overflows=False)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(LocalScalingError, match=r"rank 1 has overflow.*ShardedGradScaler"):
        scaled(model, scaler, optimizer, overflows=True)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@on_ranks(2)
def test_a_scaler_that_all_ranks_follow_is_allowed():
    """All ranks overflow: all skip. And scalers of a subclass that asks the other ranks never raise."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchScaler

    for scaler in (TorchScaler("cpu", init_scale=8.0), ShardedGradScaler("cpu", init_scale=8.0)):
        model = wrap_each(mlp(4, 9, 5))
        scaled(model, scaler, sgd(model), overflows=True)
        assert scaler.get_scale() == 4.0
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = wrap_each(mlp(4, 9, 5))
    after_backward(model, scaler)
    for param in model.parameters():
        param.grad.fill_(math.nan)
    scaler.step(sgd(model))
    scaler.update()
    assert scaler.get_scale() == 4.0


@on_ranks(2)
def test_a_rank_out_of_batches_does_not_wait_for_a_clip_that_raises():
    """Under `join` torch's clipping raises on all ranks: the ranks that are done would not clip with the others."""
    model = wrap_each(mlp(4, 9, 5))
    optimizer = sgd(model)

    def train():
        with model.join(stateful=[optimizer]):
            for _ in range(1 + dist.get_rank()):
                after_backward(model)
                clip_grad_norm_(model.parameters(), 1e-3)
                optimizer.step()

    with pytest.raises(RuntimeError, match="clip_grad_norm_"):
        train()
