"""fairshard's wrapper, with shards, gradients and steps in one place or another; see `PLACEMENTS`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engines.engine import Engine, Options, wrap_children
from fairshard.nn import FullyShardedDataParallel as FSDP

PLACEMENTS = {
    "none": {},
    "offload": {"cpu_offload": True},
    "overlap": {"cpu_offload": True},
    "torch-adamw": {"cpu_offload": True},
    "master": {"move_grads_to_cpu": True},
    "held": {"cpu_offload": True, "move_grads_to_cpu": False},
}


class _SteppedOnCPU(Engine):
    """`CPUOptimizer` clips by itself, or steps during the last backward without clipping."""

    def __init__(self, model: nn.Module, options: Options, overlaps: bool):
        from fairshard.optim import CPUOptimizer  # the other placements measure memory without it

        clip = None if overlaps else options.max_norm
        optimizer = CPUOptimizer(model, torch.optim.AdamW, lr=1e-3, clip_grad_norm=clip, overlap=overlaps)
        super().__init__(model, Options(), optimizer)

    def backward(self, loss: Tensor, is_last: bool) -> None:
        if not (is_last and self.optimizer.overlap):
            loss.backward()
            return
        with self.optimizer.last_backward():
            loss.backward()


def wrapped(model: nn.Module, units: nn.Module, options: Options, **settings: Any) -> FSDP:
    """Wrap ``model``, and the children of ``units`` first."""
    if options.bf16:
        settings.update(mixed_precision=True, compute_dtype=torch.bfloat16)
    wrap_children(units, lambda unit: FSDP(unit, **settings))
    return FSDP(model, **settings)


def build(name: str, model: nn.Module, units: nn.Module, options: Options) -> Engine:
    """Build the placement ``name``; the optimizer is torch's in ``"none"`` and ``"torch-adamw"``."""
    model = wrapped(model, units, options, **PLACEMENTS[name])
    if name in ("none", "torch-adamw"):
        return Engine(model, options)
    return _SteppedOnCPU(model, options, name == "overlap")
