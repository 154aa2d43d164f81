"""Whole training runs give plain torch's numbers, in every combination of settings.

On CPU everything is exact: the reference adds in rank order and divides afterwards, as the engine does. Only the total
norm has a tolerance, because its sum runs over shards instead of parameters; both sides then clip by the engine's norm.
NCCL adds in its own order, so on GPUs the tolerance is a few roundings of the reduce dtype.
"""

import contextlib
import math

import pytest
import torch
import torch.distributed as dist

from fairshard.nn import Owned, RowBlocks
from tests.covering import all_cells, covering_array, over_cells, random_cells
from tests.kit import rank_device
from tests.models import tiny, tiny_batch, tiny_loss, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import Reference, assert_same_state, sgd

NUM_STEPS, NUM_MICRO, MAX_NORM = 4, 3, 0.3

AXES = {
    "world_size": [1, 2, 3],
    "flatten": [True, False],
    "reshard": [True, False],
    "precision": ["fp32", "bf16", "fp16", "fp32_reduce"],
    "accumulate": ["none", "no_sync", "sharded"],
    "clip": [None, 2.0, math.inf],
    "checkpointing": [None, "reentrant", "not_reentrant"],
    "bucket": [0, 0.001, 25],
}

PRECISIONS = {
    "fp32": ({}, torch.float32, torch.float32),
    "bf16": ({"mixed_precision": True, "compute_dtype": torch.bfloat16}, torch.bfloat16, torch.bfloat16),
    "fp16": ({"mixed_precision": True}, torch.float16, torch.float16),
    "fp32_reduce": (
        {"mixed_precision": True, "compute_dtype": torch.bfloat16, "fp32_reduce_scatter": True},
        torch.bfloat16,
        torch.float32,
    ),
}

PLACEMENTS = {
    "blocks": lambda param: RowBlocks(2),
    "owned": lambda param: Owned(),
    "each_kind": lambda param: Owned() if param.dim() > 1 else [None, RowBlocks(), Owned(0)][param.numel() % 3],
}
PLACED_AXES = {**AXES, "placement": ["flat", *PLACEMENTS]}

CELLS = covering_array(PLACED_AXES)
OTHER_CELLS = [cell for each in all_cells(AXES) if (cell := {**each, "placement": "flat"}) not in CELLS]
MORE_CELLS = random_cells(PLACED_AXES, 100)


def _train(cell):
    settings, compute_dtype, reduce_dtype = PRECISIONS[cell["precision"]]
    model = tiny(cell["checkpointing"])
    reference = Reference(model, compute_dtype, reduce_dtype)
    wrapped = wrap_tiny(
        model,
        reshard_after_forward=cell["reshard"],
        flatten_parameters=cell["flatten"],
        bucket_cap_mb=cell["bucket"],
        use_orig_params=cell["placement"] != "flat",
        placement_fn=PLACEMENTS.get(cell["placement"]),
        **settings,
    )
    of_reference, of_wrapped = sgd(reference.master), sgd(wrapped)
    exact = rank_device().type == "cpu"
    eps = torch.finfo(reduce_dtype).eps  # of each sum over ranks, on gradients near 1 and a rate of 0.1
    rtol, atol = (0.0, 0.0) if exact else (4 * eps, max(1e-5, eps / 4))
    num_micro = 1 if cell["accumulate"] == "none" else NUM_MICRO
    for step in range(NUM_STEPS):
        for micro in range(num_micro):
            *inputs, targets = tiny_batch(dist.get_rank(), step, micro)
            sync = cell["accumulate"] != "no_sync" or micro == num_micro - 1
            expected = tiny_loss(reference(*inputs), targets)
            expected.backward()
            reference.reduce_grads() if sync else reference.keep_grads()
            with contextlib.nullcontext() if sync else wrapped.no_sync():
                actual = tiny_loss(wrapped(*inputs), targets)
                actual.backward()
            torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
        if cell["clip"] is not None:
            _clip_both(reference, wrapped, cell["clip"], rtol)
        of_reference.step()
        of_wrapped.step()
        of_reference.zero_grad()
        of_wrapped.zero_grad()
    assert_same_state(wrapped.state_dict(), reference.master.state_dict(), rtol, atol)


def _clip_both(reference, wrapped, norm_type, rtol):
    expected = reference.grad_norm(norm_type)
    norm = wrapped.clip_grad_norm_(MAX_NORM, norm_type)
    # The engine adds fp32 squares in another order than the fp64 reference: a few roundings of 2**-24.
    torch.testing.assert_close(norm.double(), expected, rtol=max(1e-6, rtol), atol=0)
    assert norm > MAX_NORM, "the test must clip"
    reference.scale_grads(MAX_NORM / (norm + 1e-6))


@over_cells(CELLS)
@on_ranks()
def test_every_pair_of_settings_trains_as_plain_torch(cell):
    """Losses and final weights equal the reference's, in cells that cover every pair of settings."""
    _train(cell)


@pytest.mark.full
@over_cells(OTHER_CELLS)
@on_ranks()
def test_every_combination_of_settings_trains_as_plain_torch(cell):
    """The same holds in all other cells."""
    _train(cell)


@pytest.mark.full
@over_cells(MORE_CELLS)
@on_ranks()
def test_many_placements_train_as_plain_torch(cell):
    """The same holds in 100 random cells of all settings with all placements."""
    _train(cell)
