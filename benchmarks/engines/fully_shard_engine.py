"""fairshard's ``fully_shard`` at its defaults."""

from __future__ import annotations

import torch
from torch import nn

from engines.engine import Engine, Options
from fairshard.nn import MixedPrecisionPolicy, fully_shard


def build(model: nn.Module, units: nn.Module, options: Options) -> Engine:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if options.bf16 else None)
    for unit in list(units.children()):
        fully_shard(unit, mp_policy=policy)
    return Engine(fully_shard(model, mp_policy=policy), options)
