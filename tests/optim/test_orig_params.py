"""Optimizers over the views of ``use_orig_params``: CPUOptimizer, the loss scaler, and what is refused."""

import contextlib

import pytest
import torch

from fairshard.errors import HeldGradientError, StaleOptimizerError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.optim import CPUOptimizer
from tests.models import mlp, wrap_each
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, randn

HELD = {"cpu_offload": True, "move_grads_to_cpu": False}
PLACEMENTS = pytest.mark.parametrize(
    "placement",
    [{}, {"cpu_offload": True}, {"move_grads_to_cpu": True}, HELD],
    ids=["device", "offload", "master", "held"],
)


def build(**settings):
    return wrap_each(mlp(4, 9, 7, 5), bucket_cap_mb=0, **settings)


def groups_of(model):
    named = dict(model.named_parameters())
    return [
        {"params": [named[name] for name in named if name.endswith("weight")], "weight_decay": 0.1},
        {"params": [named[name] for name in named if name.endswith("bias")], "lr": 0.02},
    ]


def backward(model, step, scaler=None):
    loss = model(randn(3, 4, key=step)).float().square().sum()
    (loss if scaler is None else scaler.scale(loss)).backward()


@pytest.mark.pairs
@on_ranks(1, in_full(2), 3)
@PLACEMENTS
@pytest.mark.parametrize("clip", [None, 0.1])
def test_param_groups_by_original_parameter_in_every_placement(placement, clip):
    """Rates and weight decay per parameter give the plain optimizer's weights, clipped or not, accumulated or not."""
    model = build(use_orig_params=True, **placement)
    twin = wrap_each(mlp(4, 9, 7, 5), flatten_parameters=False)
    options = {"lr": 0.1, "momentum": 0.9, "foreach": False}
    ours = CPUOptimizer(model, torch.optim.SGD, params=groups_of(model), clip_grad_norm=clip, **options)
    plain = torch.optim.SGD(groups_of(twin), **options)
    for step in range(3):
        for one in (model, twin):
            with one.no_sync() if step else contextlib.nullcontext():
                backward(one, (step, 0))
            backward(one, (step, 1))
        if clip is not None:
            twin.clip_grad_norm_(clip)
        for optimizer in (ours, plain):
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)
    ours_state, state = model.state_dict(), twin.state_dict()
    if clip is None:
        assert_same_state(ours_state, state)
    else:  # the norm is summed in another order
        assert_same_state(ours_state, state, rtol=1e-6, atol=1e-7)


@on_ranks(in_full(2), 3)
@PLACEMENTS
def test_steps_during_the_backward(placement):
    """With ``overlap`` views are stepped early, with the same bits."""
    model = build(use_orig_params=True, **placement)
    twin = build(use_orig_params=True)
    options = {"lr": 0.1, "momentum": 0.9}
    early = CPUOptimizer(model, torch.optim.SGD, params=groups_of(model), overlap=True, **options)
    late = CPUOptimizer(twin, torch.optim.SGD, params=groups_of(twin), **options)
    for step in range(3):
        backward(twin, step)
        with early.last_backward():
            backward(model, step)
        for optimizer in (early, late):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(model.state_dict(), twin.state_dict())


@on_ranks(2)
def test_half_moments_and_a_part_on_the_device():
    """``state_dtype`` and ``offload_fraction`` apply by unit and by view; training goes on and state is in bf16."""
    model = build(use_orig_params=True, cpu_offload=True)
    optimizer = CPUOptimizer(model, torch.optim.AdamW, lr=0.01, state_dtype=torch.bfloat16, offload_fraction=0.5)
    for step in range(2):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    assert all(state["exp_avg"].shape == param.shape for param, state in optimizer.state.items())
    on_cpu = {state["exp_avg"].dtype for param, state in optimizer.state.items() if param.device.type == "cpu"}
    assert on_cpu == {torch.bfloat16}


@on_ranks(2)
def test_held_gradients_and_stale_parameters_are_refused():
    """A plain optimizer that would skip views, and one built before wrapping, raise at their first step."""
    model = build(use_orig_params=True, **HELD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model, 0)
    assert all(param.grad is None for param in model.parameters())
    assert len(model.params_with_grad) == 6
    with pytest.raises(HeldGradientError, match=r"`0\.weight`"):
        optimizer.step()
    unwrapped = mlp(4, 9, 5)
    stale = torch.optim.SGD(unwrapped.parameters(), lr=0.1)
    backward(FSDP(unwrapped, use_orig_params=True), 0)
    with pytest.raises(StaleOptimizerError, match=r"`0\.weight`"):
        stale.step()
