"""DeepSpeed's ZeRO-3, when it is installed (``pip install deepspeed``; it is not among our dependencies)."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.engine import Engine, Options, fused_adamw

if not torch.accelerator.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed  # reads the variable while it is imported


class _ZeRO3(Engine):
    """DeepSpeed's engine object takes over backward and step."""

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss)

    def step(self) -> None:
        self.model.step()


def build(model: nn.Module, units: nn.Module, options: Options) -> Engine:
    """Leave the units to DeepSpeed, which gathers parameter by parameter, at its default thresholds."""
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))  # all ranks are on this machine
    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": options.bf16},
    }
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=fused_adamw(model), config=config)
    return _ZeRO3(engine, optimizer)
