"""Trains with torchtitan: its models are sharded by fairshard's `fully_shard`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fairshard.integrations.torch_names import redirect, require, restore
from fairshard.nn import fully_shard

__all__ = ["disable", "enable", "enabled"]

require("torchtitan", at_least="0.3")

PACKAGES = ("torchtitan",)


def enable() -> None:
    """Make torchtitan shard models with fairshard's `fully_shard`.

    Call it before the trainer is built; torchtitan may have been imported before. Only code of torchtitan is affected:
    models that you keep outside that package import ``fully_shard`` from ``fairshard.nn``.
    """
    redirect(PACKAGES, {"fully_shard": fully_shard})


def disable() -> None:
    """Undo `enable`; models that are already sharded stay so."""
    restore(PACKAGES)


@contextmanager
def enabled() -> Iterator[None]:
    """`enable` inside the block, and `disable` after it."""
    enable()
    try:
        yield
    finally:
        disable()
