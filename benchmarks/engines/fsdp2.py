"""PyTorch's FSDP2, ``fully_shard``."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from engines.engine import Engine, Options


def build(model: nn.Module, units: nn.Module, options: Options) -> Engine:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if options.bf16 else None)
    offload = CPUOffloadPolicy(options.device.type != "cpu") if options.is_offloaded else OffloadPolicy()
    children = list(units.children())
    for module in [*children, model]:
        fully_shard(module, mp_policy=policy, offload_policy=offload)
    if options.prefetch:
        _prefetch_neighbours([model, *children])
    return Engine(model, options)


def _prefetch_neighbours(in_forward_order: list[nn.Module]) -> None:
    """Make each unit start the gather of the unit that runs after it, in forward and in backward."""
    for earlier, later in itertools.pairwise(in_forward_order):
        earlier.set_modules_to_forward_prefetch([later])
        later.set_modules_to_backward_prefetch([earlier])
