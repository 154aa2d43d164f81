"""Old paths of modules that have moved: they work for one more release, with a warning."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any


def moved(old: str, new: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of module ``old``, which is empty: names are those of module ``new``, with a warning.

    Raises:
        AttributeError: module ``new`` has no such name.
    """

    def find(name: str) -> Any:
        if name.startswith("__"):  # torch and inspect look for these in every module
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(new), name)
        warnings.warn(
            f"`{old}` has moved to `{new}`, and the old path goes with the next release. Import `{name}` from there.",
            DeprecationWarning,
            stacklevel=2,
        )
        return found

    return find
