"""Moments in bf16: half the memory, nearly the same losses, the same bits after a load."""

import copy

import pytest
import torch

from fairshard.optim import CPUOptimizer
from tests.models import mlp, tiny, tiny_batch, tiny_loss, wrap_each, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import randn


@on_ranks(2)
def test_half_moments_follow_the_loss_of_full_ones():
    """With ``state_dtype=torch.bfloat16`` moments take half the memory, and losses stay close over 60 steps.

    With stochastic rounding a moment is off by at most 2**-8 of itself, and by 0 on average: an update is off by less
    than 1 %, a loss that falls from 2.6 by less than 2 % of itself.
    """
    curves, sizes = [], []
    for state_dtype in (None, torch.bfloat16):
        model = wrap_tiny(tiny(), cpu_offload=True)
        optimizer = CPUOptimizer(model, torch.optim.AdamW, lr=3e-3, state_dtype=state_dtype)
        losses = []
        for step in range(60):
            *inputs, targets = tiny_batch(step % 3)
            loss = tiny_loss(model(*inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        curves.append(losses)
        moments = [state["exp_avg_sq"] for state in optimizer.state.values()]
        sizes.append(sum(moment.nbytes for moment in moments))
    assert curves[0][-1] < 0.5 * curves[0][0], "the test must train"
    assert curves[1] == pytest.approx(curves[0], rel=0.02)
    assert 2 * sizes[1] == sizes[0]


@on_ranks(2)
def test_half_moments_are_the_same_after_a_load():
    """Stochastic rounding depends on shard and step only: a run resumed from a state dict repeats every bit."""
    states = []
    for resume in (False, True):
        model = wrap_each(mlp(4, 9, 7, 5), cpu_offload=True)
        optimizer = CPUOptimizer(model, torch.optim.AdamW, lr=0.01, state_dtype=torch.bfloat16)
        for step in range(4):
            if resume and step == 2:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = CPUOptimizer(model, torch.optim.AdamW, lr=0.01, state_dtype=torch.bfloat16)
                optimizer.load_state_dict(saved)
            model(randn(3, 4, key=step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(state["exp_avg"].dtype == torch.bfloat16 for state in optimizer.state.values())
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


@on_ranks(1)
def test_rounding_does_not_drift_for_optimizers_without_a_step_count():
    """SGD's momentum under a constant gradient of 1 tends to 1 / (1 - 0.99): the mean of many stays within 1 %."""
    model = wrap_each(mlp(30, 40), cpu_offload=True)
    optimizer = CPUOptimizer(model, torch.optim.SGD, lr=1e-9, momentum=0.99, state_dtype=torch.bfloat16)
    model(torch.ones(1, 30)).sum().backward()
    expected = 0.0
    for _ in range(400):
        for param in model.parameters():
            param.grad.fill_(1.0)
        optimizer.step()
        expected = 0.99 * expected + 1.0
    means = [state["momentum_buffer"].float().mean().item() for state in optimizer.state.values()]
    assert means == pytest.approx([expected] * len(means), rel=0.01)
