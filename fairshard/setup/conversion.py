"""What ``.to()`` and the like may do to a model that is sharded."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fairshard.engine.unit import Unit


def check_conversion(unit: Unit, fn: Callable[[Tensor], Tensor]) -> None:
    """Raise if ``fn``, about to be applied to all tensors, would change dtype or device of a unit that has run.

    Raises:
        TypeError: it would.
    """
    if unit.root is None:
        return
    for flat_param in unit.flat_params:
        shard = flat_param.shard
        changed = fn(shard.data.new_empty(0))
        if changed.dtype != shard.dtype or changed.device != shard.device:
            raise TypeError(
                f"Dtype and device must be settled before the first forward, but `{flat_param.name}` would "
                f"go from {shard.dtype} on {shard.device} to {changed.dtype} on {changed.device}. Convert "
                "the module before sharding it, or use mixed precision (`mixed_precision`, `mp_policy`)."
            )
