"""What users are told about a model that is right, but takes more memory than it must; and where they are told it."""

from __future__ import annotations

import sys
import warnings
from typing import Any

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


def warn_opaque_outputs(fqn: str, outputs: Any) -> None:
    """Unit ``fqn`` stays gathered because of what it returned."""
    warnings.warn(
        f"Unit `{fqn or 'root'}` returned {type(outputs).__name__}, which holds objects that fairshard cannot look "
        "into. It stays gathered from now on, since a backward through them could not be seen in time. Return tensors "
        "in tuples, lists, dicts or dataclasses.",
        stacklevel=level_of_user(),
    )
