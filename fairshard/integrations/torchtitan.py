"""Trains with torchtitan: its models are sharded by fairshard's `fully_shard`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from fairshard.integrations.torch_names import loaded, require, swap, torchs_modules
from fairshard.nn import fully_shard

__all__ = ["disable", "enable", "enabled"]

require("torchtitan", at_least="0.3")

_enabled: list[ExitStack] = []


def enable() -> None:
    """Make torchtitan shard models with fairshard's `fully_shard`.

    Call it before the trainer is built; torchtitan may have been imported before. Until `disable`, other code that
    imports ``fully_shard`` from ``torch.distributed.fsdp`` gets fairshard's too. A second call does nothing.
    """
    if not _enabled:
        _enabled.append(swap([*loaded(["torchtitan"]), *torchs_modules()], {"fully_shard": fully_shard}))


def disable() -> None:
    """Undo `enable`; models that are already sharded stay so, and modules imported meanwhile keep what they have."""
    while _enabled:
        _enabled.pop().close()


@contextmanager
def enabled() -> Iterator[None]:
    """`enable` inside the block, and `disable` after it."""
    enable()
    try:
        yield
    finally:
        disable()
