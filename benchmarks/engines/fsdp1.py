"""PyTorch's FSDP1, the wrapper ``FullyShardedDataParallel``."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from engines.engine import Engine, Options, wrap_children


def build(model: nn.Module, units: nn.Module, options: Options) -> Engine:
    bf16 = torch.bfloat16
    settings = {
        "device_id": options.device,  # without it FSDP1 looks for an accelerator and fails
        "mixed_precision": MixedPrecision(bf16, bf16, bf16) if options.bf16 else None,
        "cpu_offload": CPUOffload(options.is_offloaded),
    }
    if options.prefetch:
        settings |= {
            "forward_prefetch": True,
            "backward_prefetch": BackwardPrefetch.BACKWARD_PRE,
            "limit_all_gathers": True,
        }
    wrap_children(units, lambda unit: FSDP(unit, **settings))
    return Engine(FSDP(model, **settings), options)
