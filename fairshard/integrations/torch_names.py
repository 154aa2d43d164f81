"""Puts fairshard's objects in the place of those of ``torch.distributed.fsdp``, while code of another package runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from types import ModuleType
from typing import Any
from unittest import mock

import torch.distributed.checkpoint.state_dict  # noqa: F401  # otherwise it may be first imported in `swapped`

# Modules of torch from which packages import FSDP.
_SOURCES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed._composable.fsdp",
)


def torchs_modules() -> list[ModuleType]:
    """The modules of torch from which packages import FSDP."""
    return [importlib.import_module(source) for source in _SOURCES]


def loaded(packages: Iterable[str]) -> list[ModuleType]:
    """The loaded modules of ``packages``, which are first names, such as ``"accelerate"``."""
    first = set(packages)
    modules = list(sys.modules.items())
    return [module for name, module in modules if isinstance(module, ModuleType) and name.partition(".")[0] in first]


def swap(modules: Iterable[ModuleType], names: Mapping[str, Any]) -> ExitStack:
    """Wherever ``modules`` have an object that torch calls by one of ``names``, set the object given; until closed."""
    sources = [vars(source) for source in torchs_modules()]
    ours = {id(source[name]): own for source in sources for name, own in names.items() if name in source}
    found = [(module, name, value) for module in modules for name, value in vars(module).items() if id(value) in ours]
    stack = ExitStack()
    for module, name, value in found:
        stack.enter_context(mock.patch.object(module, name, ours[id(value)]))
    return stack


def swapped(names: Mapping[str, Any]) -> ExitStack:
    """Inside, whoever reads ``names`` in ``torch.distributed.fsdp``, by an import too, gets the objects given."""
    return swap(torchs_modules(), names)


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
