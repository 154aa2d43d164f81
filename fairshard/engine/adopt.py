"""Adopts what the user has changed in the middle of a forward, before one of its units is called."""

from __future__ import annotations

from fairshard.engine.listener import OrderListener
from fairshard.engine.unit import Unit
from fairshard.utils.streams import now


def adopt_changes(unit: Unit, order_check: OrderListener) -> None:
    """A call of ``unit`` begins: adopt changes of ``requires_grad``; free it if it was gathered before a write.

    It was gathered ahead, or stayed gathered after an earlier call. Every rank must write: ``order_check`` is told of
    the second gather. On an accelerator it starts after the write; the first may have read half of it, and writes
    through ``.data`` are not looked for, because the host would wait for the device.

    Raises:
        ShardChangedError: the unit was written to through ``.data``.
    """
    if unit.listing.is_computing:  # called inside a call of its own: the leaves are registered
        return
    unit.listing.following.follow()
    for flat_param in unit.flat_params if unit.members is None else ():  # DTensors refuse it, when a pass begins
        if flat_param.shows.has_moved:  # the user has assigned to `.data` of a registered parameter
            flat_param.begin_pass()
    versions = unit.versions.read()
    if unit.shared.is_asynchronous and versions != unit.seen:
        unit.shared.unshard_stream.wait(now(unit.device))
        unit.seen = versions
    if unit.stamp is None or unit.stamp[1] == versions:
        if unit.is_resident and not unit.shared.is_asynchronous and not unit.listing.is_written:
            unit.listing.following.check_values()
        return
    for flat_param in unit.flat_params:
        flat_param.begin_pass()
    if unit.is_gathered:
        unit.reshard()
        order_check.gather_again(unit)
