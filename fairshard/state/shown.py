"""Which units show whole parameters; `full_params.show` makes them."""

from __future__ import annotations

import weakref

from fairshard.engine.training_state import TrainingState
from fairshard.engine.unit import Unit

shown_on_first: weakref.WeakSet[Unit] = weakref.WeakSet()
"""Units that an active `show` shows on rank 0 alone; the same on every rank."""


def is_shown(unit: Unit) -> bool:
    """Whether a `show` of ``unit`` is active, on this rank or another one."""
    return unit.state is TrainingState.SUMMON_FULL_PARAMS
