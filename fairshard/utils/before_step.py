"""Notifies listeners before an optimizer changes tensors, for example a background save that still reads them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from fairshard.utils.graph_breaks import untraced

_listeners: dict[int, Callable[[], Any]] = {}


@functools.cache
def install() -> None:
    """Register the hook that notifies the listeners; torch calls hooks in the order in which they are registered."""
    register_optimizer_step_pre_hook(_before_step)


def add_before_step(key: int, method: Callable[[], Any]) -> None:
    """Register ``method``, a weak reference to a bound method, to be called before any optimizer step."""
    install()
    _listeners[key] = method


def remove_before_step(key: int) -> None:
    """Undo `add_before_step`."""
    _listeners.pop(key, None)


def about_to_step() -> None:
    """Notify all listeners; optimizers that step parameters outside ``step`` call this."""
    for key, reference in list(_listeners.items()):
        method = reference()
        if method is None:
            remove_before_step(key)
        else:
            method()


@untraced
def _before_step(*_: Any) -> None:
    about_to_step()
