"""The wrapper and ``fully_shard``, each with options that change the contents of state dicts."""

from functools import partial

import pytest
import torch

from fairshard.nn import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fairshard.nn import FullyShardedDataParallel as FSDP

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
