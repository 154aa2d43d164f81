"""An unsharded model: PyTorch's DistributedDataParallel, whose losses all others must reach, or torch alone."""

from __future__ import annotations

import torch
from torch import nn

from engines.engine import Engine, Options


def build(name: str, model: nn.Module, units: nn.Module, options: Options) -> Engine:
    """Wrap the root alone, or nothing if ``name`` is ``"plain"``; bf16 is autocast over fp32 parameters."""
    engine = Engine(model if name == "plain" else nn.parallel.DistributedDataParallel(model), options)
    if options.bf16:
        engine.autocast = torch.autocast(options.device.type, torch.bfloat16)
    return engine
