"""Losses and weights equal DistributedDataParallel's: to the bit at 1 and 2 ranks, closely at 3.

DDP divides every rank's gradient before it adds; we divide the sum. At 1 and 2 ranks both are exact halvings, so
the bits agree. At 3 ranks DDP rounds a third three times and we round it once: in each step the last bit of a gradient
may differ. After 20 steps the difference stays below 1e-6 relative to the largest weight.
"""

import contextlib
import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.kit import rank_device
from tests.models import tiny, tiny_batch, tiny_loss, wrap_tiny
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, sgd

NUM_STEPS, NUM_MICRO, MAX_NORM = 20, 2, 0.3


def train(model, accumulate, clip, num_steps=NUM_STEPS):
    """Losses of a whole run; ``clip(model)`` is called before each step."""
    optimizer = sgd(model)
    losses = []
    for step in range(num_steps):
        num_micro = NUM_MICRO if accumulate else 1
        for micro in range(num_micro):
            *inputs, targets = tiny_batch(dist.get_rank(), step, micro)
            with model.no_sync() if micro < num_micro - 1 else contextlib.nullcontext():
                loss = tiny_loss(model(*inputs), targets)
                loss.backward()
            losses.append(loss.detach())
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def train_both(accumulate, norm_type, **kwargs):
    """Losses and final states of DDP and the wrapped model, from the same start on the same batches."""
    model = tiny()
    ddp = DistributedDataParallel(copy.deepcopy(model))
    wrapped = wrap_tiny(model, **kwargs)
    if norm_type is None:
        clips = [lambda _: None, lambda _: None]
    else:
        clips = [
            lambda ddp: torch.nn.utils.clip_grad_norm_(ddp.parameters(), MAX_NORM, norm_type),
            lambda wrapped: wrapped.clip_grad_norm_(MAX_NORM, norm_type),
        ]
    losses = [train(m, accumulate, clip) for m, clip in zip((ddp, wrapped), clips, strict=True)]
    return losses, (ddp.module.state_dict(), wrapped.state_dict())


@pytest.mark.pairs
@on_ranks(1, 2)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("reshard", [True, False])
def test_exact_at_one_and_two_ranks(accumulate, flatten, reshard):
    """20 steps give the same losses and the same weights, to the bit."""
    (expected, losses), states = train_both(accumulate, None, flatten_parameters=flatten, reshard_after_forward=reshard)
    rtol = 0.0 if rank_device().type == "cpu" else 1e-6
    torch.testing.assert_close(losses, expected, rtol=rtol, atol=0)
    assert_same_state(states[1], states[0], rtol, rtol)
    assert losses[-1] < losses[0], "the model must learn something"


@on_ranks(3)
@pytest.mark.parametrize("accumulate", [False, True])
def test_close_at_three_ranks(accumulate):
    """20 steps give the same losses and weights up to 1e-6."""
    (expected, losses), states = train_both(accumulate, None)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
    assert_same_state(states[1], states[0], rtol=1e-6, atol=1e-6)


@on_ranks(in_full(1), in_full(2), 3)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_close_when_clipped(norm_type):
    """Clipped runs stay close to torch's; a norm is summed over other parts, so its last bits may differ."""
    (expected, losses), states = train_both(False, norm_type)
    torch.testing.assert_close(losses, expected, rtol=2e-6, atol=0)
    assert_same_state(states[1], states[0], rtol=2e-6, atol=2e-6)
