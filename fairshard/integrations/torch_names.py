"""Lets chosen packages read names of ``torch.distributed.fsdp`` as fairshard's; other readers get PyTorch's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

# Modules of torch from which packages import FSDP.
_SOURCES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed._composable.fsdp",
)

# For each package, by its first name: the names that it reads as other objects.
_read_as: dict[str, dict[str, Any]] = {}


class _Name:
    """Attribute of a module of torch, whose value depends on the package of the code that reads it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: Any) -> Any:
        """The object for the package of the caller."""
        if module is None:
            return self
        package = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        names = _read_as.get(package, {})
        if self.name in names:
            return names[self.name]
        if self.name not in vars(module):
            raise AttributeError(f"module {module.__name__!r} has no attribute {self.name!r}")
        return vars(module)[self.name]

    def __set__(self, module: Any, value: Any) -> None:
        """Set what other readers get."""
        vars(module)[self.name] = value

    def __delete__(self, module: Any) -> None:
        """Delete what other readers get."""
        del vars(module)[self.name]


def redirect(packages: Iterable[str], names: Mapping[str, Any]) -> None:
    """Make code of ``packages`` read ``names`` of ``torch.distributed.fsdp`` as the objects given.

    This concerns ``import`` statements and attribute access from now on, and names that loaded modules of the packages
    have already imported. Code of all other packages, torch included, keeps reading PyTorch's objects. ``packages`` are
    first names, such as ``"accelerate"``.
    """
    theirs = _of_torch(names)
    for package in packages:
        for module in _loaded(package):
            for name, value in list(vars(module).items()):
                for own_name, originals in theirs.items():
                    if any(value is original for original in originals):
                        setattr(module, name, names[own_name])
        _read_as[package] = dict(names)
    _answer_by_reader(names)


@contextmanager
def reading(packages: Iterable[str], names: Mapping[str, Any]) -> Iterator[None]:
    """As `redirect`, inside the block only, and not for names that modules have already imported."""
    packages = list(packages)
    before = {package: _read_as[package] for package in packages if package in _read_as}
    for package in packages:
        _read_as[package] = {**before.get(package, {}), **names}
    _answer_by_reader(names)
    try:
        yield
    finally:
        for package in packages:
            del _read_as[package]
        _read_as.update(before)


def restore(packages: Iterable[str]) -> None:
    """Undo `redirect` for ``packages``; objects that they have already made stay as they are."""
    for package in packages:
        names = _read_as.pop(package, {})
        theirs = _of_torch(names)
        for module in _loaded(package):
            for name, value in list(vars(module).items()):
                for own_name, own in names.items():
                    if value is own and theirs[own_name]:
                        setattr(module, name, theirs[own_name][0])


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


def _answer_by_reader(names: Iterable[str]) -> None:
    """From now on, what modules of torch answer for ``names`` depends on the reader."""
    for source in _SOURCES:
        module = importlib.import_module(source)
        kept = {name: value for name, value in vars(type(module)).items() if isinstance(value, _Name)}
        here = {name: _Name(name) for name in names if name in vars(module)}
        if here.keys() - kept.keys():
            # Assigning the class of a module is how Python customizes its attribute access.
            module.__class__ = type("_ModuleOfTorch", (ModuleType,), {**here, **kept})


def _of_torch(names: Iterable[str]) -> dict[str, list[Any]]:
    """PyTorch's own objects of these names."""
    modules = [importlib.import_module(source) for source in _SOURCES]
    return {name: [vars(module)[name] for module in modules if name in vars(module)] for name in names}


def _loaded(package: str) -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and name.partition(".")[0] == package
    ]
