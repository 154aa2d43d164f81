"""The line of the user that a warning points at."""

from __future__ import annotations

import sys

_NOT_THE_USERS = ("fairshard", "torch")


def level_of_user() -> int:
    """The ``stacklevel`` with which a warning of the function that asks points at the user's line.

    That is the innermost one outside of this package and torch, whichever door and observers stand in between.
    """
    frame = sys._getframe(1)
    level = 1
    while frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        if frame.f_back is None:
            return 1
        frame = frame.f_back
        level += 1
    return level
