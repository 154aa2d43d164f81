"""Reduce gradients that ``no_sync`` has kept, without a backward."""

from __future__ import annotations

from fairshard.engine.root import Root


def has_kept_grads(root: Root) -> bool:
    """Whether the last backward has left gradients to send or to keep; equal on all ranks."""
    return any(flat_param.is_owed for unit in root.units for flat_param in unit.flat_params)


def reduce_kept_grads(root: Root) -> None:
    """Reduce what ``no_sync`` has kept in units that reduce again, then free parameters that a backward would free.

    **Collective.**

    Raises:
        TrainingStateError: in the middle of a pass.
    """
    root.assert_idle("post_backward")
    root.order_check.begin_backward()
    root.follow_backward([])
    root.finish_grads()
    root.order_check.end_backward(ends_step=True, is_common=True)
    if root.nan_check.is_on:
        root.nan_check.end_backward()
    for unit in root.units:
        if unit.sync:
            for flat_param in unit.flat_params:
                flat_param.note_reached(bytearray(len(flat_param.slots)))
        if unit.is_gathered and unit.frees_in_backward:
            unit.reshard()
