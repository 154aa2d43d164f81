"""Where shards and gradients are kept, and when they are stepped, never changes a bit: the exactness matrix.

Each cell trains twice on the same data: with its own settings, and with everything on the compute device under a plain
torch optimizer. Losses, weights and momenta must be equal bit for bit, and close to those of a single process that
sees the batches of all ranks. A combination that is not supported must raise by name.
"""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.errors import HeldGradientError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.optim import CPUOptimizer, ShardedGradScaler
from tests.covering import all_cells, covering_array, over_cells
from tests.kit import rank_device
from tests.models import DIM, tiny, tiny_batch, tiny_loss, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import rounding

NUM_STEPS, OVERFLOW_STEP, LR = 4, 1, 0.1

WAYS = {
    "placement": ["device", "offload", "master_on_cpu", "held"],
    "optimizer": ["overlap", "after", "plain"],
}
SETTINGS = {
    "accumulate": ["none", "no_sync", "sharded", "two_backwards"],
    "set_to_none": [True, False],
    "clip": ["none", "active", "inactive"],
    "precision": ["fp32", "bf16", "fp16"],
    "checkpointing": [None, "reentrant", "not_reentrant"],
    "special": ["tied", "frozen", "unused"],
}
AXES = {"world_size": [1, 2, 3], **WAYS, **SETTINGS}

PLACEMENTS = {
    "device": {},
    "offload": {"cpu_offload": True},
    "master_on_cpu": {"move_grads_to_cpu": True},
    "held": {"cpu_offload": True, "move_grads_to_cpu": False},
}
PRECISIONS = {
    "fp32": {},
    "bf16": {"mixed_precision": True, "compute_dtype": torch.bfloat16},
    "fp16": {"mixed_precision": True},
}
CLIPS = {"none": None, "active": 0.05, "inactive": 1e9}
# fp32 adds in another order; bf16 and fp16 have 8 and 11 bits of mantissa. Four SGD steps, losses around 2.6.
BOUNDS = {"fp32": 2e-6, "bf16": 3e-2, "fp16": 5e-3}


def _build(cell):
    model = tiny(cell["checkpointing"])
    if cell["special"] == "frozen":
        model.first.requires_grad_(False)
        model.second.norm.requires_grad_(False)
    if cell["special"] == "unused":
        model.second.extra = nn.Parameter(torch.ones(7, device=rank_device()))
        model.spare = nn.Linear(DIM, DIM, device=rank_device())
    return model


def _num_passes(cell):
    return 1 if cell["accumulate"] == "none" else 2


def _is_poisoned(cell, step, rank):
    """Whether this rank's loss overflows in this step, which all ranks must then skip."""
    return cell["precision"] == "fp16" and step == OVERFLOW_STEP and rank == 0


def _optimizer(kind, cell, model):
    params = [param for param in model.parameters() if param.requires_grad]
    if kind == "plain":
        return torch.optim.SGD(params, lr=LR, momentum=0.9, fused=True)
    clip = CLIPS[cell["clip"]]
    is_known_late = clip is not None or cell["precision"] == "fp16"  # whether to step, and by how much
    return CPUOptimizer(
        model,
        torch.optim.SGD,
        params=params,
        lr=LR,
        momentum=0.9,
        clip_grad_norm=clip,
        overlap=kind == "overlap" and not is_known_late,
    )


def _backwards(cell, model, optimizer, scaler, step):
    """All passes of one step; returns their losses."""
    rank, num_passes = dist.get_rank(), _num_passes(cell)
    factor = float("inf") if _is_poisoned(cell, step, rank) else 1.0

    def forward(index):
        *inputs, targets = tiny_batch(rank, step, index)
        return tiny_loss(model(*inputs), targets) / num_passes

    waiting = []
    losses = []
    for index in range(num_passes):
        is_last = index == num_passes - 1
        no_sync = cell["accumulate"] == "no_sync" and not is_last
        with model.no_sync() if no_sync else contextlib.nullcontext():
            waiting.append(forward(index))
            losses.append(waiting[-1].detach().clone())
            if cell["accumulate"] == "two_backwards" and not is_last:
                continue  # both forwards come before both backwards
            for number, loss in enumerate(waiting):
                early = is_last and number == len(waiting) - 1 and getattr(optimizer, "overlap", False)
                with optimizer.last_backward(scaler) if early else contextlib.nullcontext():
                    scaler.scale(loss * factor).backward()
            waiting.clear()
    return losses


def _train(cell, placement, kind):
    model = _build(cell)
    if cell["special"] == "unused":
        model.spare = FSDP(model.spare, **PLACEMENTS[placement], **PRECISIONS[cell["precision"]])
    model = wrap_tiny(model, bucket_cap_mb=0.001, **PLACEMENTS[placement], **PRECISIONS[cell["precision"]])
    optimizer = _optimizer(kind, cell, model)
    scaler = ShardedGradScaler(rank_device().type, init_scale=2.0**8, enabled=cell["precision"] == "fp16")
    losses = []
    for step in range(NUM_STEPS):
        losses += _backwards(cell, model, optimizer, scaler, step)
        if kind == "plain":
            scaler.unscale_(optimizer)
            if CLIPS[cell["clip"]] is not None:
                model.clip_grad_norm_(CLIPS[cell["clip"]])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(cell["set_to_none"])
    momenta = [optimizer.state[param].get("momentum_buffer") for param in model.parameters()]
    return losses, model.state_dict(), momenta


def _train_alone(cell):
    """Train one process with fp32 weights on the batches of all ranks."""
    model = copy.deepcopy(_build(cell))
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(params, lr=LR, momentum=0.9)
    ranks, num_passes = range(dist.get_world_size()), _num_passes(cell)
    for step in range(NUM_STEPS):
        for rank in ranks:
            for index in range(num_passes):
                *inputs, targets = tiny_batch(rank, step, index)
                (tiny_loss(model(*inputs), targets) / num_passes / len(ranks)).backward()
        for param in params:  # sharded, an unused one has a gradient of zeros
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        if not any(_is_poisoned(cell, step, rank) for rank in ranks):
            if CLIPS[cell["clip"]] is not None:
                nn.utils.clip_grad_norm_(params, CLIPS[cell["clip"]])
            optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _check(cell, ways):
    """Compare all ``ways`` (placement and optimizer) with the run without offload, under the settings in ``cell``."""
    same_losses, same_state, same_momenta = _train(cell, "device", "plain")
    bound = BOUNDS[cell["precision"]]
    for name, value in _train_alone(cell).items():
        torch.testing.assert_close(same_state[name], value, rtol=bound, atol=bound, msg=lambda m, n=name: f"{n}: {m}")
    for way in ways:
        if way == {"placement": "held", "optimizer": "plain"}:
            with pytest.raises(HeldGradientError, match=r"fairshard\.optim\.CPUOptimizer"):
                _train(cell, "held", "plain")
            continue
        losses, state, momenta = _train(cell, way["placement"], way["optimizer"])
        assert [loss.item() for loss in losses] == [loss.item() for loss in same_losses], way
        for name, value in same_state.items():
            torch.testing.assert_close(state[name], value, rtol=rounding()[0], atol=rounding()[1], msg=str((way, name)))
        for one, other in zip(momenta, same_momenta, strict=True):
            assert (one is None) == (other is None), way
            rtol, atol = rounding()
            if one is not None:
                torch.testing.assert_close(one, other, rtol=rtol, atol=atol, check_device=False, msg=str(way))


@over_cells(covering_array(AXES))
@on_ranks()
def test_every_pair_of_settings_is_exact(cell):
    """For every pair of settings, losses, weights and momenta equal those of the run without offload."""
    _check(cell, [{name: cell[name] for name in WAYS}])


@pytest.mark.full
@over_cells(all_cells({"world_size": [2], **SETTINGS}))
@on_ranks()
def test_every_combination_of_settings_is_exact(cell):
    """On two ranks the same holds for every combination of placements, optimizers and settings."""
    _check(cell, all_cells(WAYS))
