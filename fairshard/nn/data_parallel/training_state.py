"""The phases that a unit goes through."""

from enum import Enum


class TrainingState(Enum):
    """What a unit is doing.

    ``BACKWARD_PRE`` lasts from the arrival of the backward at the unit until its gradients are on their way,
    ``BACKWARD_POST`` from there to the end of the backward. `FullyShardedDataParallel.assert_state` also takes
    ``BACKWARD``, fairscale's single name for both.
    """

    IDLE = 1
    FORWARD = 2
    BACKWARD_PRE = 3
    BACKWARD_POST = 4
    SUMMON_FULL_PARAMS = 5
    BACKWARD = 6

    def includes(self, state: "TrainingState") -> bool:
        """Whether a unit in ``state`` is in this state."""
        if self is TrainingState.BACKWARD:
            return state in (TrainingState.BACKWARD_PRE, TrainingState.BACKWARD_POST, TrainingState.BACKWARD)
        return self is state
