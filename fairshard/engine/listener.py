"""Interfaces of the objects that the engine notifies of a model's passes, and that setup creates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from torch import Tensor

from fairshard.engine.exec_order import Pass
from fairshard.engine.unit import Unit
from fairshard.utils.collectives import Communicator


class OrderListener(Protocol):
    """Records what this rank has run, to report its position and where ranks differ."""

    step: int

    def begin_forward(self, is_compared: bool) -> None:
        """A pass through the model starts."""

    def watch(self) -> None:
        """The calling thread runs the model from now on."""

    def note(self, unit: Unit) -> None:
        """``unit`` is called, gathered or sent."""

    def gather(self, unit: Unit) -> None:
        """``unit`` is gathered in a forward, outside of ``join``."""

    def gather_again(self, unit: Unit) -> None:
        """``unit`` is gathered once more at its call, because the forward has written to its weights."""

    def end_forward(self, completed: bool) -> None:
        """The pass is over, or has raised."""

    def begin_backward(self) -> None:
        """A backward starts."""

    def end_backward(self, ends_step: bool, is_common: bool) -> None:
        """A backward is over."""

    def forget(self) -> None:
        """A pass was interrupted."""

    def count_step(self) -> None:
        """An optimizer has stepped the model, outside of ``join``."""

    def history(self, comm: Communicator, in_join: bool, in_backward: bool) -> tuple[int, ...]:
        """Numbers that are equal on all ranks of ``comm`` if these have run the same things so far."""

    def recorded(self, state: dict[str, str]) -> Any:
        """The units that this rank has run, for an error; ``state``: what else must be the same on all ranks."""

    def raise_difference(self, state: dict[str, str]) -> NoReturn:
        """Raise, because ranks have run different things; ``state`` describes this rank in words. **Collective.**"""


class GradListener(Protocol):
    """Checks gradients before they are reduced, and their sums afterwards."""

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
    """Lets ranks that have run out of batches take part in the passes of the others."""

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
        """The backward is over; returns whether all ranks have computed it."""

    def check_all_compute(self, what: str) -> None:
        """Raise if some ranks are done, because ``what`` needs all of them."""

    def announced_call(self, call: str, *arguments: Any) -> Any:
        """A context in which all ranks make ``call``."""
