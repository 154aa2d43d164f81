"""What happens in a model, for those who listen: checks, profiles, uneven inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fairshard.utils.collectives import Communicator


class Observer:
    """Listens to one model; a method that a class does not override is not called.

    In a backward, ``gather`` and ``grads_sent`` only record: raise what they find in ``backward_ends``, on all ranks.
    Units are `Unit`s, passes `Pass`es. Whether an event happens, and in which order, is the same on all ranks, except
    for ``interrupted``.
    """

    def pass_begins(self, unit: Any, is_trained: bool) -> None:
        """The outermost call of the model in a pass begins, at ``unit``, with gradients if ``is_trained``."""

    def call_enters(self, unit: Any) -> None:
        """A call of ``unit`` begins."""

    def gather(self, unit: Any, in_backward: bool) -> None:
        """``unit`` is gathered next."""

    def call_leaves(self, unit: Any, completed: bool, is_last: bool) -> None:
        """A call of ``unit`` has returned, or raised, and is closed next; ``is_last``: the pass ends with it.

        What this raises after a call that has returned ends the call as if the module had raised it.
        """

    def backward_begins(self, passes: Sequence[Any]) -> None:
        """A backward that may reach ``passes`` begins; what this raises is raised on all ranks."""

    def grads_sent(self, unit: Any) -> None:
        """The gradients of ``unit`` are sent, or kept under ``no_sync``, next."""

    def backward_ends(self, is_reached: bool, reduces: bool) -> None:
        """A backward is over.

        ``is_reached``: it has reached a unit of the model; ``reduces``: it has reduced gradients.
        """

    def interrupted(self, in_backward: bool) -> None:
        """A pass or a backward has raised, and is dropped."""

    # ---- what ranks compare, and what needs all of them

    def facts(self, comm: Communicator) -> Sequence[int]:
        """Numbers that must be the same on all ranks of ``comm`` when a backward begins."""
        return ()

    def ranks_differ(self) -> None:
        """The ranks have run different things: raise an error that says what. **Collective.**"""

    def needs_all(self, what: str) -> None:
        """``what``, which needs all ranks, is called between passes."""


EVENTS = (
    "pass_begins",
    "call_enters",
    "gather",
    "call_leaves",
    "backward_begins",
    "grads_sent",
    "backward_ends",
    "interrupted",
)


def passing_on(observers: Sequence[Observer]) -> Observer:
    """An observer that passes each event on to those of ``observers`` that listen to it, in order."""
    made = Observer()
    for event in EVENTS:
        heard = [getattr(one, event) for one in observers if getattr(type(one), event) is not getattr(Observer, event)]
        if heard:
            setattr(made, event, heard[0] if len(heard) == 1 else _all(heard))
    return made


def _all(listeners: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def tell(*args: Any) -> None:
        for listener in listeners:
            listener(*args)

    return tell
