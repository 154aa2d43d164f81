"""Size and tangle of code, counted from syntax trees: neither long lines nor short files improve a figure.

    python -m tests.kit.gauge fairshard.engine.root    # the files that a module reaches, and their figures

A module reaches the files of its package that it imports, directly or through others, for types alone too: what one
must know to know that module.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path

_FLAG = re.compile(r"_*(is|has|had|was|were|keeps|reads|waits|uses|needs|can|in)_")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case)


@dataclass(frozen=True)
class Figures:
    """What is counted; less is better."""

    statements: int = 0
    """Docstrings are not counted."""
    branches: int = 0
    """Conditions, loops, handlers, cases, each further operand of ``and`` and ``or``, each ``for`` and ``if`` of a
    comprehension."""
    shared: int = 0
    """Attributes of instances that more than one method of their class assigns."""
    flags: int = 0
    """Attributes and fields that are True or False, by their value, their type or their name."""
    patches: int = 0
    """Assignments to attributes of what other packages own."""

    def __add__(self, other: Figures) -> Figures:
        return Figures(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def above(self, limits: Figures) -> dict[str, tuple[int, int]]:
        """``{name: (figure, limit)}`` of the figures that are above their limits."""
        names = [field.name for field in fields(self)]
        pairs = {name: (getattr(self, name), getattr(limits, name)) for name in names}
        return {name: (figure, limit) for name, (figure, limit) in pairs.items() if figure > limit}


class Package:
    """The syntax trees of the package in ``folder``, by module."""

    def __init__(self, folder: Path):
        self.name = folder.name
        self.trees: dict[str, ast.Module] = {}
        self._folders = {self.name}  # modules that are an ``__init__.py``
        for path in sorted(folder.rglob("*.py")):
            parts = [self.name, *path.relative_to(folder).with_suffix("").parts]
            if parts[-1] == "__init__":
                parts.pop()
                self._folders.add(".".join(parts))
            self.trees[".".join(parts)] = ast.parse(path.read_text())

    def reached_from(self, start: str) -> list[str]:
        """The modules of the package that ``start`` reaches, itself included, sorted.

        Raises:
            ValueError: the package has no such module.
        """
        if start not in self.trees:
            raise ValueError(f"`start` must be a module of {self.name}, but is {start!r}.")
        found, waiting = {start}, [start]
        while waiting:
            new = {name for name in self._imports(waiting.pop()) if name in self.trees} - found
            found |= new
            waiting += new
        return sorted(found)

    def figures(self, names: Iterable[str]) -> Figures:
        """The sum of the figures of the modules ``names``."""
        return sum((_measure(self.trees[name], self.name) for name in names), Figures())

    def _imports(self, name: str) -> Iterator[str]:
        """Every name that an import of module ``name`` may mean a module by."""
        for node in ast.walk(self.trees[name]):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._base(name, node)
                yield from (base, *(f"{base}.{alias.name}" for alias in node.names))

    def _base(self, name: str, node: ast.ImportFrom) -> str:
        """The absolute name of the module that ``node`` imports from."""
        parts = name.split(".")
        above = node.level - (name in self._folders)
        start = parts[: len(parts) - above] if node.level else []
        return ".".join([*start, *filter(None, [node.module])])


def _measure(tree: ast.Module, package: str) -> Figures:
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    shared, flags = (sum(counts) for counts in zip((0, 0), *map(_attributes, classes), strict=True))
    return Figures(_statements(tree), _branches(tree), shared, flags, _patches(tree, package))


def _statements(tree: ast.Module) -> int:
    documented = (ast.Module, ast.ClassDef, *_FUNCTIONS)
    return sum(
        isinstance(node, ast.stmt) - (isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None)
        for node in ast.walk(tree)
    )


def _branches(tree: ast.Module) -> int:
    number = 0
    for node in ast.walk(tree):
        if isinstance(node, _BRANCHES):
            number += 1
        elif isinstance(node, ast.BoolOp):
            number += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            number += 1 + len(node.ifs)
    return number


def _attributes(cls: ast.ClassDef) -> tuple[int, int]:
    """The numbers of shared attributes and of flags of one class."""
    methods: dict[str, set[str]] = defaultdict(set)
    flags = set()
    for node in cls.body:
        if isinstance(node, _FUNCTIONS):
            for target, value in _assignments(node):
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    methods[target.attr].add(node.name)
                    if isinstance(value, ast.Constant) and isinstance(value.value, bool):
                        flags.add(target.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):  # a field of a dataclass
            methods[node.target.id] |= set()
            if isinstance(node.annotation, ast.Name) and node.annotation.id == "bool":
                flags.add(node.target.id)
    flags |= {name for name in methods if _FLAG.match(name)}
    return sum(len(own) > 1 for own in methods.values()), len(flags)


def _assignments(function: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """``(target, value)`` of each assignment in ``function``; tuples are taken apart."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
            targets = [node.target]
        else:
            continue
        for target in targets:
            if not isinstance(target, ast.Tuple):
                yield target, node.value
            elif isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)
            else:
                yield from ((one, node.value) for one in target.elts)


def _patches(tree: ast.Module, package: str) -> int:
    """Assignments to attributes of names that are imported from other packages, and calls of ``setattr`` on them."""
    foreign = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            others = [alias for alias in node.names if not alias.name.startswith(package)]
            foreign |= {(alias.asname or alias.name).partition(".")[0] for alias in others}
        elif isinstance(node, ast.ImportFrom) and not node.level and not (node.module or "").startswith(package):
            foreign |= {alias.asname or alias.name for alias in node.names}

    def is_foreign(node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id in foreign

    number = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            number += sum(isinstance(target, ast.Attribute) and is_foreign(target.value) for target in node.targets)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr" and node.args:
            number += is_foreign(node.args[0])
    return number


def main(*modules: str) -> None:
    """Print the figures of each file that ``modules`` reach, and their sums."""
    names = [field.name for field in fields(Figures)]
    print(f"{'':50}" + "".join(f"{name:>11}" for name in names))
    for start in modules:
        package = Package(Path(start.partition(".")[0]))
        reached = package.reached_from(start)
        rows = {name: package.figures([name]) for name in reached}
        rows[f"{len(reached)} files reached from {start}"] = package.figures(reached)
        for name, figures in rows.items():
            print(f"{name:50}" + "".join(f"{number:11,}" for number in astuple(figures)))


if __name__ == "__main__":
    main(*sys.argv[1:])
