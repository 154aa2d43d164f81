"""What happens to one unit at one moment of a training step, as `fairshard.nn.observe` tells it."""

from enum import Enum
from typing import NamedTuple

END = "_end"
"""An event that takes time is told twice: when it begins and, with this added to its name, when it has ended."""


class Phase(Enum):
    """The part of a training step that an event belongs to."""

    FORWARD = "forward"
    """Up to the backward; what a backward computes again belongs to that."""
    PRE_BACKWARD = "pre_backward"
    """The backward, as far as parameters are wanted for it."""
    POST_BACKWARD = "post_backward"
    """The backward, as far as gradients are there and parameters are wanted no more."""
    STEP = "step"
    """The optimizer's step."""


class UnitEvent(NamedTuple):
    """One event.

    ``fqn`` is the unit's name in the whole model, empty for the outermost one; of a unit of several modules, and of a
    bucket of several units, all their names joined by ``", "``. ``event`` says what happens, by a name of the table in
    `fairshard.nn.observe`; ``phase`` in which part of the step; ``time`` when, in seconds of ``time.perf_counter()``.
    """

    fqn: str
    event: str
    phase: Phase
    time: float
