"""PyTorch's DistributedDataParallel: unsharded, and the reference whose losses all others must reach."""

from __future__ import annotations

import torch
from torch import nn

from engines.engine import Engine, Options


def build(model: nn.Module, units: nn.Module, options: Options) -> Engine:
    """Wrap the root alone (DDP has no units); bf16 is autocast, since DDP keeps fp32 parameters."""
    engine = Engine(nn.parallel.DistributedDataParallel(model), options)
    if options.bf16:
        engine.autocast = torch.autocast(options.device.type, torch.bfloat16)
    return engine
