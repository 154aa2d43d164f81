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
    """DeepSpeed's engine object takes over backward and step, and clips."""

    def backward(self, loss: Tensor, is_last: bool) -> None:
        self.model.backward(loss)

    def step(self) -> None:
        self.model.step()


def build(model: nn.Module, units: nn.Module, options: Options) -> Engine:
    """Leave the units to DeepSpeed, which gathers parameter by parameter, at its default thresholds."""
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))  # all ranks are on this machine
    offload = {"device": "cpu", "pin_memory": options.device.type != "cpu"} if options.is_offloaded else None
    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_accumulation_steps": options.accumulate,
        "gradient_clipping": options.max_norm or 0.0,
        "zero_optimization": {"stage": 3, "offload_optimizer": offload, "offload_param": offload},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": options.bf16},
    }
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=_optimizer(model, options), config=config)
    return _ZeRO3(engine, options, optimizer)


def _optimizer(model: nn.Module, options: Options) -> torch.optim.Optimizer:
    if not options.is_offloaded:
        return fused_adamw(model)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(model.parameters(), lr=1e-3, adamw_mode=True)
