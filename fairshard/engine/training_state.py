"""The phases that a unit goes through."""

from collections.abc import Iterable
from enum import Enum
from typing import Any

from fairshard.errors import TrainingStateError


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


def assert_none_summoned(units: Iterable[Any], what: str) -> None:
    """Raise if the parameters of one of ``units``, `Unit`s, are summoned when a ``what`` begins.

    Raises:
        TrainingStateError: a unit is summoned.
    """
    for unit in units:
        if unit.state is TrainingState.SUMMON_FULL_PARAMS:
            raise TrainingStateError(
                f"A {what} must not run inside summon_full_params, but unit `{unit.fqn or 'root'}` is summoned. "
                "Leave the `with` block first. Only a forward under `torch.no_grad()`, such as that of `generate`, may "
                "run inside, if all units or the outermost alone (`recurse=False`) are summoned, on all ranks."
            )
