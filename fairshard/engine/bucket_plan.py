"""Which gradients a backward will put into buckets, as far as it is known when it starts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fairshard.engine.unit import Unit
    from fairshard.params.flat_param import FlatParam


def planned(units: Iterable[Unit]) -> list[FlatParam]:
    """The flat params of ``units`` whose gradients are summed over ranks in a bucket, in this order."""
    return [
        flat_param
        for unit in units
        if unit.sync
        for flat_param in unit.flat_params
        if flat_param.requires_grad
        and flat_param.shard_numel
        and flat_param.comms.num_ranks > 1
        and flat_param.hook is None
    ]
