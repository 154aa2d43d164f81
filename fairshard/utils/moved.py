"""Old paths of modules that have moved: they work for one more release, with a warning."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any


def moved(old: str, new: str) -> Callable[[str], Any]:
    """A ``__getattr__`` for the empty module ``old`` that finds names in module ``new``, with a warning.

    Raises:
        AttributeError: module ``new`` has no such name.
    """

    def find(name: str) -> Any:
        if name.startswith("__"):  # torch and inspect look for these in every module
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(new), name)
        warnings.warn(
            f"`{old}` has moved to `{new}`; the next release removes the old path. Import `{name}` from there.",
            DeprecationWarning,
            stacklevel=2,
        )
        return found

    return find
