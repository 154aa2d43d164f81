"""Looking on while methods of single objects are called; objects that nobody looks at pay nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

Around = Callable[..., Any]
"""``around(method, *args)`` is called in place of ``method(*args)``, calls it, and returns what it returns."""


class _Tap:
    """An attribute of ``owner`` that hides the method of that name and is called in its place."""

    def __init__(self, owner: Any, name: str) -> None:
        self.method = getattr(owner, name)
        self.arounds: list[Around] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.method
        for around in self.arounds:
            call = partial(around, call)
        return call(*args, **kwargs)


def tap(owner: Any, name: str, around: Around) -> Callable[[], None]:
    """Let ``around`` be called whenever ``owner.name(...)`` is; the function returned undoes it.

    Several may look on, and leave in any order; with the last of them ``owner`` is as if there had been none.
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
