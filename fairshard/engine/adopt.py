"""Adopts what the user has changed in the middle of a forward, before one of its units is called."""

from __future__ import annotations

from fairshard.engine.unit import Unit
from fairshard.params.versions import versions_of
from fairshard.utils.before_step import num_steps
from fairshard.utils.streams import now


def adopt_changes(unit: Unit) -> bool:
    """A call of ``unit`` begins: adopt changes of ``requires_grad``; free it, and return True, if it was written to.

    It was gathered ahead, or stayed gathered after an earlier call. Every rank must write. On an accelerator the next
    gather starts after the write; one that was ahead may have read half of it, and is discarded.
    """
    if unit.listing.is_computing:  # called inside a call of its own: the leaves are registered
        return False
    unit.following.follow()
    stamp = num_steps(), versions_of(unit.flat_params)
    if unit.shared.is_asynchronous and stamp != unit.seen:
        unit.shared.unshard_stream.wait(now(unit.device))
        unit.seen = stamp
    if unit.stamp is None or unit.stamp == stamp:
        return False
    for flat_param in unit.flat_params:
        flat_param.begin_pass()
    if unit.is_gathered:
        unit.reshard()
        return True
    return False
