"""fairshard at its defaults. The file cannot be called ``fairshard.py``: that is the package it measures."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engines.engine import Engine, Options, wrap_children
from fairshard.nn import FullyShardedDataParallel as FSDP


def build(model: nn.Module, units: nn.Module, options: Options) -> Engine:
    return Engine(wrapped(model, units, options), options)


def wrapped(model: nn.Module, units: nn.Module, options: Options, **settings: Any) -> FSDP:
    """Wrap ``model``, and the children of ``units`` first."""
    if options.bf16:
        settings.update(mixed_precision=True, compute_dtype=torch.bfloat16)
    wrap_children(units, lambda unit: FSDP(unit, **settings))
    return FSDP(model, **settings)
