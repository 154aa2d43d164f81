"""The engines under test: an adapter a file, each a function ``build(model, units, options) -> Engine``.

``units`` is the container (in ``model``, or ``model`` itself) whose children are sharded one by one before
the root.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

from torch import nn

from engines.engine import Engine, Options

ADAPTERS = {
    "fairshard": "fairshard_engine",
    "fairshard-fully-shard": "fully_shard_engine",
    "fsdp2": "fsdp2",
    "fsdp1": "fsdp1",
    "ddp": "ddp",
    "deepspeed": "deepspeed",
}

OURS = ("fairshard", "fairshard-fully-shard")
"""Both doors; what is not ours is a peer."""

VARIANTS = {
    "fsdp2": ("fsdp2", "fsdp2-prefetch"),
    "fsdp1": ("fsdp1", "fsdp1-prefetch"),
}
"""Peers with explicit prefetch settings run both ways and are compared at the better one."""


def variants(engine: str) -> tuple[str, ...]:
    """List the settings in which ``engine`` is measured."""
    return VARIANTS.get(engine, (engine,))


def build(variant: str, model: nn.Module, units: nn.Module, options: Options) -> Engine:
    """Wrap ``model`` in the engine that ``variant`` names. Only this engine's packages are imported."""
    engine, _, setting = (variant, "", "") if variant in ADAPTERS else variant.partition("-")
    adapter = importlib.import_module(f"engines.{ADAPTERS[engine]}")
    return adapter.build(model, units, replace(options, prefetch=setting == "prefetch"))
