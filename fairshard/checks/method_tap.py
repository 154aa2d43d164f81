"""Intercept method calls of individual objects; other objects have no overhead."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

Around = Callable[..., Any]
"""``around(method, *args)`` replaces ``method(*args)``; it calls ``method`` and returns the result."""


class _Tap:
    """An attribute of ``owner`` that hides and wraps the method of that name."""

    def __init__(self, owner: Any, name: str) -> None:
        self.method = getattr(owner, name)
        self.arounds: list[Around] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.method
        for around in self.arounds:
            call = partial(around, call)
        return call(*args, **kwargs)


def tap(owner: Any, name: str, around: Around) -> Callable[[], None]:
    """Call ``around`` in place of ``owner.name(...)``; returns a function that undoes it.

    A method may have several taps, removed in any order; removing the last one restores ``owner``.
    """
    found = vars(owner).get(name)
    if not isinstance(found, _Tap):
        found = _Tap(owner, name)
        setattr(owner, name, found)
    found.arounds.append(around)

    def undo() -> None:
        if around in found.arounds:
            found.arounds.remove(around)
        if not found.arounds and vars(owner).get(name) is found:
            delattr(owner, name)

    return undo
