"""The wrapper and ``fully_shard``, each with options that change the contents of state dicts."""

from functools import partial

import pytest
import torch

from fairshard.nn import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.trained import odd

BF16 = {"mixed_precision": True, "compute_dtype": torch.bfloat16}
DOORS = {
    "flat": FSDP,
    "apart": partial(FSDP, flatten_parameters=False),
    "orig": partial(FSDP, use_orig_params=True),
    "offload": partial(FSDP, cpu_offload=True),
    "bf16": partial(FSDP, **BF16),
    "rows": fully_shard,
    "rows_offload": partial(fully_shard, offload_policy=CPUOffloadPolicy()),
    "rows_bf16": partial(fully_shard, mp_policy=MixedPrecisionPolicy(torch.bfloat16)),
}
every_door = pytest.mark.parametrize("door", DOORS)


def sharded(door, seed):
    """An `odd` model in two units."""
    model = odd(seed)
    model.frozen = DOORS[door](model.frozen)
    return DOORS[door](model)


def whole_state(model):
    """The model's state, whole on every rank, in memory of its own."""
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for name, value in model.state_dict().items()
    }
