"""A model as its backward sees it: the part of `Root` that `Backward` and `Planner` use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from fairshard.engine.exec_order import Record
from fairshard.engine.listener import GradListener
from fairshard.engine.shared import Shared
from fairshard.engine.unit import Unit
from fairshard.utils.autograd import reaches, runs
from fairshard.utils.collectives import Communicator


class Model(Protocol):
    """A model that a backward goes through.

    Attributes:
        note: is called with each unit before it is gathered or sent.
        nan_check: looks at gradients before they are sent.
        last: what the planner keeps for the next backward, a `Last`.
        is_last_backward: no other backward of the same forwards follows.
    """

    number: int
    note: Callable[[Unit], None]
    units: list[Unit]
    shared: Shared
    comms: list[Communicator]
    comms_of: dict[Unit, set[Communicator | None]]
    record: Record[Unit]
    nan_check: GradListener
    last: Any
    is_last_backward: bool

    @property
    def is_common(self) -> bool:
        """Whether its backward needs all ranks."""

    def begin_backward(self, backward: Any) -> None:
        """``backward`` goes through the model."""

    def keeps_after_forward(self, unit: Unit) -> bool:
        """Whether ``unit`` stays gathered from its forward to its backward."""

    def history(self, comm: Communicator) -> tuple[int, ...]:
        """Numbers that are equal on all ranks of ``comm`` if these have run the same things so far."""

    def raise_difference(self) -> NoReturn:
        """Raise, because ranks have run different things. **Collective.**"""

    def end_backward(self, backward: Any) -> None:
        """The backward is over."""

    def leave_backward(self) -> None:
        """The backward is over, and has reached no unit of the model."""


def is_reached(model: Model) -> bool:
    """Whether the running graph task reaches a recorded call of ``model``."""
    for bracket in model.record:
        call = None if bracket.call is None else bracket.call()
        node = None if bracket.node is None else bracket.node()
        if (call is not None and call.is_reached()) or (node is not None and runs(node)):
            return True
    return False


def is_split_off(model: Model) -> bool:
    """Whether the running graph task computes gradients of inputs alone, as a pipeline schedule that splits backwards.

    Only if the schedule has set ``model`` up for one of several backwards, in which gradients are kept.
    """
    if model.is_last_backward or any(unit.sync or unit.reshard_after_backward for unit in model.units):
        return False
    if any(bracket.node is not None for bracket in model.record):  # leaves inside reentrant checkpoints show only later
        return False
    nodes = [node for unit in model.units for node in unit.nodes]
    return bool(nodes) and not any(map(reaches, nodes))
