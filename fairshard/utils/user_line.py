"""The line of the user's code at which a warning points."""

from __future__ import annotations

import sys

_NOT_THE_USERS = ("fairshard", "torch")


def level_of_user() -> int:
    """The ``stacklevel`` with which a warning in the calling function points at the user's line.

    That is the innermost frame outside of this package and torch.
    """
    frame = sys._getframe(1)
    level = 1
    while frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        if frame.f_back is None:
            return 1
        frame = frame.f_back
        level += 1
    return level
