"""The phases that a unit goes through."""

from enum import Enum


class TrainingState(Enum):
    """The phase of a pass that a unit is in.

    ``BACKWARD_PRE`` begins when the backward reaches the unit and lasts until the unit's gradients are sent;
    ``BACKWARD_POST`` follows until the end of the backward. `FullyShardedDataParallel.assert_state` also accepts
    ``BACKWARD``, fairscale's single name for both.
    """

    IDLE = 1
    FORWARD = 2
    BACKWARD_PRE = 3
    BACKWARD_POST = 4
    SUMMON_FULL_PARAMS = 5
    BACKWARD = 6
