"""The engines under test: adapters, each a function ``build([setting,] model, units, options) -> Engine`` of a file.

``units`` is the container (in ``model``, or ``model`` itself) whose children are sharded one by one before
the root.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

from torch import nn

from engines.engine import Engine, Options

ADAPTERS = {
    "fairshard": "placed/none",
    "fairshard-fully-shard": "in_place/fairshard",
    "fsdp2": "in_place/torch",
    "fsdp1": "fsdp1",
    "least": "least",
    "ddp": "replica/ddp",
    "deepspeed": "deepspeed",
    "plain": "replica/plain",
}
"""The file of each engine, and its setting."""

OURS = ("fairshard", "fairshard-fully-shard")
"""The wrapper and ``fully_shard``; all other engines are peers."""

COMPARED = tuple(name for name in ADAPTERS if name not in ("least", "plain"))
"""What ``run.py`` measures by default. `least` decides and checks nothing: it is measured only where it is named."""

VARIANTS = {
    "fsdp2": ("fsdp2", "fsdp2-prefetch"),
    "fsdp1": ("fsdp1", "fsdp1-prefetch"),
}
"""Peers with explicit prefetch settings are measured with both, and compared at the better one."""


def variants(engine: str) -> tuple[str, ...]:
    """List the settings in which ``engine`` is measured."""
    return VARIANTS.get(engine, (engine,))


def at_commit(engine: str, revision: str) -> str:
    """Name ``engine`` as it was at a commit."""
    return f"{engine}@{revision}"


def adapter_of(variant: str) -> str:
    """Return the name in `ADAPTERS` of the engine of ``variant``, which is a setting or a former commit of it."""
    engine = variant.partition("@")[0]
    return engine if engine in ADAPTERS else engine.partition("-")[0]


def can_compare(ours: str, peer: str) -> bool:
    """Tell whether the ratio of the two is meaningful: our engines are compared with their own former commits only."""
    return adapter_of(peer) not in OURS or adapter_of(peer) == ours


def build(variant: str, model: nn.Module, units: nn.Module, options: Options) -> Engine:
    """Wrap ``model`` in the engine that ``variant`` names. Only this engine's packages are imported.

    A file and a setting that are not among `ADAPTERS`, such as ``"placed/held"``, are a variant, too.
    """
    family, _, setting = ADAPTERS.get(adapter_of(variant), variant).partition("/")
    own = replace(options, prefetch=variant.endswith("-prefetch"))
    return importlib.import_module(f"engines.{family}").build(*filter(None, [setting]), model, units, own)
