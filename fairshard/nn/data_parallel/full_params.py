"""Showing the parameters of units whole, under their own names, for as long as a ``with`` block lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from fairshard.nn.data_parallel.flat_param import FlatParam
from fairshard.nn.data_parallel.training_state import TrainingState
from fairshard.nn.data_parallel.unit import Unit


@contextmanager
def summon(units: list[Unit], writeback: bool) -> Iterator[None]:
    """`show` all of ``units`` at once. **Collective.**"""
    with ExitStack() as stack:
        for unit in units:
            stack.enter_context(show(unit, writeback))
        yield


@contextmanager
def show(unit: Unit, writeback: bool) -> Iterator[None]:
    """Register the whole parameters of ``unit``, in the precision of its shards, under their own names.

    With ``writeback`` this rank's span of what they hold at the end goes into its shard; what was written to the
    spans of other ranks is lost unless those write the same. After an exception nothing is written back.
    **Collective.**
    """
    before, unit.state = unit.state, TrainingState.SUMMON_FULL_PARAMS
    try:
        if unit.is_gathered and not unit.is_pinned:
            unit.reshard()
        with ExitStack() as stack:
            for flat_param in unit.flat_params:
                stack.enter_context(_shown(flat_param, writeback))
            yield
    finally:
        unit.state = before
        if unit.is_gathered:
            unit.wait_unshard()


@contextmanager
def _shown(flat_param: FlatParam, writeback: bool) -> Iterator[None]:
    fulls = [nn.Parameter(full, requires_grad=flat_param.requires_grad) for full in flat_param.gather_full()]
    undo: list[Callable[[], None]] = []
    try:
        undo.append(flat_param.unregister())
        undo.extend(slot.expose(full) for slot, full in zip(flat_param.slots, fulls, strict=True))
        yield
        if writeback:
            with torch.no_grad():
                flat_param.shard.copy_(flat_param.cut(list(fulls)))
    finally:
        for step in undo:
            step()
