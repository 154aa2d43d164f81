"""Training through `fully_shard` gives plain torch's numbers, to the bit, in every pair of settings.

The reference adds in rank order and divides afterwards. PyTorch sums the norm of DTensors in another order, so the norm
is compared with a tolerance, and both sides then clip by PyTorch's.
"""

import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fairshard.nn import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, Owned, RowBlocks
from fairshard.optim import ShardedGradScaler
from fairshard.views import received_in_place
from tests.covering import covering_array, over_cells, random_cells
from tests.doors.fully_shard.assorted import KINDS, Assorted, Boom, ByRows
from tests.doors.fully_shard.models import full_state, shard_tiny
from tests.kit import rank_device
from tests.models import tiny_batch, tiny_loss
from tests.on_ranks import on_ranks
from tests.reference import Reference, assert_same_state

NUM_STEPS, NUM_MICRO, MAX_NORM, SCALE = 3, 2, 0.3, 2.0**6

AXES = {
    "world_size": [1, 2, 3],
    "precision": ["fp32", "bf16", "bf16_fp32", "fp16"],
    "offload": [False, True],
    "accumulate": ["none", "no_sync", "sync", "kept"],
    "clip": [False, True],
    "checkpointing": [None, "reentrant", "not_reentrant"],
    "reshard": [None, True, False, "number"],
    "kind": KINDS,
    "bucket": [25, 0],
    "optimizer": ["sgd", "foreach", "fused", "groups"],
    "raises": [None, "forward", "backward"],
    "in_place": ["none", "all", "large"],
    "placement": ["rows", "blocks", "some_blocks", "owned", "each_kind"],
}
MIN_NBYTES = {"none": 1 << 17, "all": 1, "large": 32}  # a rank, of parameters that are received in place
PRECISIONS = {
    "fp32": (None, None),
    "bf16": (torch.bfloat16, None),
    "bf16_fp32": (torch.bfloat16, torch.float32),
    "fp16": (torch.float16, None),
}
OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "foreach": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, foreach=True),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, fused=True),
    "groups": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=True),
}

PLACEMENTS = {
    "rows": None,
    "blocks": lambda param: RowBlocks(),
    "some_blocks": lambda param: RowBlocks(3) if param.dim() > 1 else None,
    "owned": lambda param: Owned(),
    "each_kind": lambda param: Owned() if param.dim() > 1 else [None, RowBlocks(), Owned(0)][param.numel() % 3],
}

CELLS = covering_array(AXES)
MORE_CELLS = [{**cell, "world_size": cell["world_size"] % 4 + 1} for cell in random_cells(AXES, 200)]


def _groups(model, name):
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    if name != "groups":
        return [{"params": list(named.values())}]
    biases = [name for name in named if name.endswith("bias")]
    return [
        {"params": [named[name] for name in named if name not in biases], "weight_decay": 0.1},
        {"params": [named[name] for name in biases], "lr": 0.02},
    ]


def _shard(model, cell):
    param_dtype, reduce_dtype = _precision(cell)
    # 4 ranks keep parameters sharded over pairs; with fewer ranks, the number is the world size.
    number = 2 if dist.get_world_size() == 4 else dist.get_world_size()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that a number of 1 means False
        return shard_tiny(
            model,
            reshard_after_forward=number if cell["reshard"] == "number" else cell["reshard"],
            mp_policy=MixedPrecisionPolicy(param_dtype, reduce_dtype),
            offload_policy=CPUOffloadPolicy() if cell["offload"] else OffloadPolicy(),
            bucket_cap_mb=cell["bucket"],
            shard_placement_fn=PLACEMENTS[cell["placement"]],
        )


def _precision(cell):
    """The compute and reduce dtypes of ``cell``; collectives of devices add 16 bits in 16 bits, so there in fp32."""
    param_dtype, reduce_dtype = PRECISIONS[cell["precision"]]
    if param_dtype is not None and rank_device().type != "cpu":
        reduce_dtype = torch.float32
    return param_dtype, reduce_dtype


def _train(cell):
    with mock.patch.object(received_in_place, "_MIN_NBYTES", MIN_NBYTES[cell["in_place"]]):
        _train_beside_reference(cell)


def _train_beside_reference(cell):
    param_dtype, reduce_dtype = _precision(cell)
    torch.manual_seed(1)
    model = Assorted(cell["kind"], cell["checkpointing"]).to(rank_device())
    reference = Reference(model, param_dtype or torch.float32, reduce_dtype, keeps_none=True)
    sharded = _shard(model, cell)
    make = OPTIMIZERS[cell["optimizer"]]
    placed = dict(sharded.named_parameters())
    placed = {param: placed[name] for name, param in reference.master.named_parameters()}
    of_reference = ByRows(_groups(reference.master, cell["optimizer"]), dist.get_world_size(), make, placed)
    of_sharded = make(_groups(sharded, cell["optimizer"]))
    kind = "cpu" if cell["offload"] else rank_device().type
    scaler = ShardedGradScaler(kind, init_scale=SCALE, enabled=cell["precision"] == "fp16")
    scale = scaler.get_scale()
    rtol = 0.0 if rank_device().type == "cpu" else 1e-5  # kernels of a device and of the CPU differ
    num_micro = 1 if cell["accumulate"] == "none" else NUM_MICRO
    for step in range(NUM_STEPS):
        if step == 1 and cell["raises"]:
            _raise(sharded, cell["raises"])
            of_sharded.zero_grad()
        for micro in range(num_micro):
            *inputs, targets = tiny_batch(dist.get_rank(), step, micro)
            is_last = micro == num_micro - 1
            sync = cell["accumulate"] in ("none", "sync") or is_last
            sharded.set_requires_gradient_sync(sync)
            sharded.set_is_last_backward(is_last)
            sharded.set_reshard_after_backward(cell["accumulate"] != "kept" or is_last)
            expected = tiny_loss(reference(*inputs), targets)
            (expected * scale).backward()
            reference.reduce_grads() if sync else reference.keep_grads()
            actual = tiny_loss(sharded(*inputs), targets)
            scaler.scale(actual).backward()
            torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol / 10)
        scaler.unscale_(of_sharded)
        reference.scale_grads(torch.tensor(1 / scale))
        if cell["clip"]:
            _clip_both(reference, sharded)
        of_reference.step()
        scaler.step(of_sharded)
        scaler.update()
        of_reference.zero_grad()
        of_sharded.zero_grad()
    assert_same_state(full_state(sharded), reference.master.state_dict(), rtol, rtol / 10)


def _raise(model, where):
    *inputs, targets = tiny_batch(0)
    model.second.extra.raises = where
    with pytest.raises(Boom):
        tiny_loss(model(*inputs), targets).backward()
    model.second.extra.raises = None


def _clip_both(reference, sharded):
    norm = torch.nn.utils.clip_grad_norm_(sharded.parameters(), MAX_NORM)
    factor = MAX_NORM / (norm + 1e-6)  # before it is gathered: torch 2.6 adds 1e-6 to the norm of every rank's part
    if isinstance(norm, DTensor):
        norm, factor = norm.full_tensor(), factor.full_tensor()
    torch.testing.assert_close(norm.double(), reference.grad_norm(2.0), rtol=1e-6, atol=0, check_device=False)
    assert norm > MAX_NORM, "the test must clip"
    reference.scale_grads(factor)


@over_cells(CELLS)
@on_ranks()
def test_every_pair_of_settings_trains_as_plain_torch(cell):
    """Losses and final weights equal the reference's, in cells that cover every pair of settings."""
    _train(cell)


@pytest.mark.full
@over_cells(MORE_CELLS)
@on_ranks()
def test_many_settings_train_as_plain_torch(cell):
    """The same holds in 200 random cells, also on 4 ranks that keep parameters sharded over pairs."""
    _train(cell)


@on_ranks(2)
def test_one_model_after_another():
    """Two models in one process share nothing."""
    for _ in range(2):
        _train(CELLS[0])
