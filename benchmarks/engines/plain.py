"""PyTorch alone, on one device: fp32 weights, under autocast in bf16."""

from __future__ import annotations

import torch
from torch import nn

from engines.engine import Engine, Options


def build(model: nn.Module, units: nn.Module, options: Options) -> Engine:
    engine = Engine(model, options)
    if options.bf16:
        engine.autocast = torch.autocast(options.device.type, torch.bfloat16)
    return engine
