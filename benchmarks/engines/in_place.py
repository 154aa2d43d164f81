"""``fully_shard``: fairshard's at its defaults, or PyTorch's FSDP2."""

from __future__ import annotations

import importlib
import itertools

import torch
from torch import nn

from engines.engine import Engine, Options

PACKAGES = {"fairshard": "fairshard.nn", "torch": "torch.distributed.fsdp"}


def build(name: str, model: nn.Module, units: nn.Module, options: Options) -> Engine:
    """Shard by the function of the package `PACKAGES` gives ``name``."""
    own = importlib.import_module(PACKAGES[name])
    settings = {"mp_policy": own.MixedPrecisionPolicy(param_dtype=torch.bfloat16 if options.bf16 else None)}
    if options.is_offloaded:
        settings["offload_policy"] = own.CPUOffloadPolicy(options.device.type != "cpu")
    modules = [model, *units.children()]
    for module in [*modules[1:], model]:
        own.fully_shard(module, **settings)
    if options.prefetch:  # each unit gathers the one that runs after it, in forward and in backward
        for earlier, later in itertools.pairwise(modules):
            earlier.set_modules_to_forward_prefetch([later])
            later.set_modules_to_backward_prefetch([earlier])
    return Engine(model, options)
