"""Objects that the engine notifies of the passes of a model. Setup makes them; the engine knows only these methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from torch import Tensor

from fairshard.engine.exec_order import Pass
from fairshard.engine.unit import Unit
from fairshard.utils.watchdog import Training


class OrderListener(Training, Protocol):
    """Keeps what this rank has run, to say where it stands and where ranks differ."""

    step: int

    def begin_forward(self, is_compared: bool) -> None:
        """A pass through the model starts."""

    def note(self, unit: Unit) -> None:
        """``unit`` is called, gathered or sent."""

    def end_forward(self, completed: bool) -> None:
        """The pass is over, or has raised."""

    def begin_backward(self) -> None:
        """A backward starts."""

    def end_backward(self, ends_step: bool, is_common: bool) -> None:
        """A backward is over."""

    def forget(self) -> None:
        """A pass was interrupted."""

    def differ(self, state: str) -> NoReturn:
        """Raise: ranks have run different things; ``state`` is this rank's, in words. **Collective.**"""


class GradListener(Protocol):
    """Looks at gradients before they are reduced, and at their sums."""

    is_on: bool

    def look(self, unit: Unit) -> None:
        """The gradients of ``unit`` are sent next."""

    def forget(self) -> None:
        """A pass was interrupted."""

    def end_backward(self) -> None:
        """Gradients are reduced. **Collective.**"""

    def warn_once(self, norm: Tensor) -> None:
        """``norm`` is the norm of all gradients. **Collective.**"""


class JoinListener(Protocol):
    """Leads ranks that have no batches left through the passes of the others."""

    throws: bool
    is_in_block: bool

    def begin_pass(self) -> None:
        """A forward begins."""

    def announce(self, unit: Unit) -> None:
        """``unit`` is gathered next, in a forward."""

    def end_pass(self) -> None:
        """The forward is over."""

    def begin_backward(self, passes: Sequence[Pass[Unit]]) -> None:
        """A backward of ``passes`` begins."""

    def end_backward(self, ends_step: bool) -> bool:
        """It is over; returns whether all ranks have computed it."""

    def check_all_compute(self, what: str) -> None:
        """Raise where ``what`` needs all ranks and some are done."""

    def announced_call(self, call: str, *arguments: Any) -> Any:
        """A context in which all ranks make ``call``."""
