"""Counts an optimizer's writes to shards where torch does not."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import increment_version


def count_writes(shards: Iterable[tuple[Tensor, Tensor]], has_grads: bool) -> None:
    """Count the writes of a step that begins: torch counts neither fused ones, nor foreach ones to DTensors.

    ``shards``: pairs of a parameter and the shard that it shows. ``has_grads``: parameters without a gradient are not
    stepped; otherwise they may get one first.
    """
    written = {id(shard): shard for param, shard in shards if not has_grads or param.grad is not None}
    for shard in written.values():
        increment_version(shard)
