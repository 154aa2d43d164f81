"""Packages whose names are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of ``package``: the first use of a name imports it from module ``homes[name]``.

    A home ``module:other`` has it as ``other``; the home ``package.name`` is that module itself. The package names its
    contents a second time under ``TYPE_CHECKING``, where type checkers and editors look; the tests compare the two.
    """

    def find(name: str) -> Any:
        if name not in homes:
            message = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=sys.modules[package])
        home, _, other = homes[name].partition(":")
        module = importlib.import_module(home)
        found = module if home == f"{package}.{name}" else getattr(module, other or name)
        setattr(sys.modules[package], name, found)
        return found

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return find, names
