"""fairshard at its defaults. The file cannot be called ``fairshard.py``: that is the package it measures."""

from __future__ import annotations

import torch
from torch import nn

from engines.engine import Engine, Options, wrap_children
from fairshard.nn import FullyShardedDataParallel as FSDP


def build(model: nn.Module, units: nn.Module, options: Options) -> Engine:
    precision = {"mixed_precision": True, "compute_dtype": torch.bfloat16} if options.bf16 else {}
    wrap_children(units, lambda unit: FSDP(unit, **precision))
    return Engine(FSDP(model, **precision))
