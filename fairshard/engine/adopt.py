"""Adopts what the user has changed in the middle of a forward, before one of its units is called."""

from __future__ import annotations

from fairshard.engine.listener import OrderListener
from fairshard.engine.unit import Unit
from fairshard.params.versions import versions_of
from fairshard.utils.before_step import num_steps
from fairshard.utils.streams import now


def adopt_changes(unit: Unit, order_check: OrderListener) -> None:
    """A call of ``unit`` begins: adopt changes of ``requires_grad``; free it if it was gathered before a write.

    It was gathered ahead, or stayed gathered after an earlier call. Every rank must write: ``order_check`` is told of
    the second gather. On an accelerator it starts after the write; the first may have read half of it.
    """
    if unit.listing.is_computing:  # called inside a call of its own: the leaves are registered
        return
    unit.following.follow()
    stamp = num_steps(), versions_of(unit.flat_params)
    if unit.shared.is_asynchronous and stamp != unit.seen:
        unit.shared.unshard_stream.wait(now(unit.device))
        unit.seen = stamp
    if unit.stamp is None or unit.stamp == stamp:
        return
    for flat_param in unit.flat_params:
        flat_param.begin_pass()
    if unit.is_gathered:
        unit.reshard()
        order_check.gather_again(unit)
