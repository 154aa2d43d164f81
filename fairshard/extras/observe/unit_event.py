"""Event of one unit at one moment of a training step, reported by `fairshard.nn.observe`."""

from enum import Enum
from typing import NamedTuple

END = "_end"
"""Suffix of the second event of a pair: an event with a duration is reported at its start and at its end."""


class Phase(Enum):
    """Part of a training step."""

    FORWARD = "forward"
    """Before the backward; a recomputation belongs to the backward."""
    PRE_BACKWARD = "pre_backward"
    """The backward while it needs the unit's parameters."""
    POST_BACKWARD = "post_backward"
    """The backward once the unit's gradients are ready and its parameters no longer needed."""
    STEP = "step"
    """The optimizer's step."""


class UnitEvent(NamedTuple):
    """One event.

    ``fqn`` is the unit's name in the whole model, empty for the outermost one. A unit of several modules, or a bucket
    of several units, has their names joined by ``", "``. ``event`` is a name from the table in `fairshard.nn.observe`;
    ``time`` is in seconds of ``time.perf_counter()``.
    """

    fqn: str
    event: str
    phase: Phase
    time: float
