"""Puts fairshard's objects in the place of those of ``torch.distributed.fsdp``, while code of another package runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch.distributed.checkpoint.state_dict  # noqa: F401  # otherwise it may be first imported in `swapped`

# Modules of torch from which packages import FSDP.
_SOURCES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed._composable.fsdp",
)

Replaced = list[tuple[Any, str, Any]]
"""Owners, names, and what the owners had there; None if they had nothing of their own."""


def torchs_modules() -> list[ModuleType]:
    """The modules of torch from which packages import FSDP."""
    return [importlib.import_module(source) for source in _SOURCES]


def loaded(packages: Iterable[str]) -> list[ModuleType]:
    """The loaded modules of ``packages``, which are first names, such as ``"accelerate"``."""
    first = set(packages)
    modules = list(sys.modules.items())
    return [module for name, module in modules if isinstance(module, ModuleType) and name.partition(".")[0] in first]


def swap(modules: Iterable[ModuleType], names: Mapping[str, Any]) -> Replaced:
    """Wherever ``modules`` have an object that torch calls by one of ``names``, set the object given."""
    sources = [vars(source) for source in torchs_modules()]
    ours = {id(source[name]): own for source in sources for name, own in names.items() if name in source}
    replaced: Replaced = []
    for module in modules:
        for name, value in list(vars(module).items()):
            if id(value) in ours:
                replaced.append((module, name, value))
                setattr(module, name, ours[id(value)])
    return replaced


def put_back(replaced: Replaced) -> None:
    """Undo, the last first; empties ``replaced``."""
    while replaced:
        owner, name, original = replaced.pop()
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


@contextmanager
def swapped(names: Mapping[str, Any]) -> Iterator[None]:
    """Inside, whoever reads ``names`` in ``torch.distributed.fsdp``, by an import too, gets the objects given."""
    replaced = swap(torchs_modules(), names)
    try:
        yield
    finally:
        put_back(replaced)


def require(package: str, *, at_least: str) -> None:
    """Check that ``package`` can be imported.

    Raises:
        ImportError: it cannot; the message has the command that installs it.
    """
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f"fairshard.integrations.{package} needs the package `{package}`, which cannot be imported ({error}). "
            f"Run: pip install '{package}>={at_least}'"
        ) from error
