"""Failures of collectives, and the observer that knows more about them.

A collective that fails raises a `CollectiveFailedError`. An observer of the default group may replace it by one that
says where every rank is: the watchdog, which each rank starts when it sets up a model (``checks/watchdog.py``).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup

from fairshard.errors import CollectiveFailedError, FairshardError

Collective = TypeVar("Collective", bound=Callable[..., Any])


class Observer(Protocol):
    """Knows more about failures on this rank."""

    def explain(self, error: Exception) -> FairshardError:
        """The error to raise for a collective that failed with ``error``."""

    def note_raised(self, error: Exception) -> None:
        """This rank raises ``error``, maybe alone."""


observers: weakref.WeakKeyDictionary[ProcessGroup, Observer] = weakref.WeakKeyDictionary()
"""The observer of each default group."""


def observer() -> Observer | None:
    """The observer of the current default group."""
    world = dist.group.WORLD
    return None if world is None else observers.get(world)


def explain(error: Exception) -> FairshardError:
    """The error to raise for a collective that failed with ``error``; an observer may take seconds to find it."""
    own = observer()
    return CollectiveFailedError(f"A collective failed: {error}") if own is None else own.explain(error)


def reported(error: FairshardError) -> FairshardError:
    """``error``, which this rank may raise alone: ranks that wait for it until a collective fails then name it."""
    own = observer()
    if own is not None:
        own.note_raised(error)
    return error


def explained(collective: Collective) -> Collective:
    """Decorate a ``collective``, or what starts one: its failures are raised through `explain`."""

    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return collective(*args, **kwargs)
        except FairshardError:
            raise
        except RuntimeError as error:
            raise explain(error) from error

    return cast(Collective, call)
