"""Refuses what must not run in the middle of something else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fairshard.engine.root import Root
from fairshard.engine.training_state import TrainingState
from fairshard.engine.unit import Unit
from fairshard.errors import TrainingStateError


def assert_none_summoned(units: Iterable[Unit], what: str) -> None:
    """Raise if the parameters of one of ``units`` are summoned when a ``what`` begins.

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


def assert_idle(root: Root, what: str, units: Sequence[Unit] | None = None) -> None:
    """Raise if a pass is running in one of ``units`` of ``root``, when ``what`` is called; None: in any.

    Raises:
        TrainingStateError: a pass is running.
    """
    root.engine.drop_interrupted(root)
    for unit in root.units if units is None else units:
        if unit.state is not TrainingState.IDLE:
            raise TrainingStateError(
                f"`{what}` must be called between passes, in state IDLE, but unit `{unit.fqn or 'root'}` is in "
                f"{unit.state.name}. Call it after the backward has returned."
            )
    for observer in root.observers:
        observer.needs_all(what)
