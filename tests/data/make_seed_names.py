"""Writes ``seed_names.txt``: every argument, method and option that the five seed documents name.

    python tests/data/make_seed_names.py FOLDER_OF_THE_SEEDS

One line per name, with the numbers of the documents that have it::

    FullyShardedDataParallel                    a class or a function
    FullyShardedDataParallel(process_group)     an argument of it, or a field of a dataclass
    FullyShardedDataParallel.no_sync            a method, a property, an attribute, a member of an enum
    FullyShardedDataParallel.apply(fn)          an argument of a method

Code is parsed; in a manual the signatures are. Names with a leading underscore are internal, except the few in
`DOCUMENTED`. Where a document only uses another part of the library, the names that it uses count.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from torch import nn
from torch.distributed.fsdp import FSDPModule

OUT = Path(__file__).with_name("seed_names.txt")
DOCUMENTED = {"_or_policy", "_module_classes_to_ignore", "_HYBRID_SHARD_ZERO2"}
LIBRARY = ("torch.distributed.fsdp", "torch.distributed.algorithms._comm_hooks", "torchdistx")
METHODS_OF_FSDP2 = {name for name in {*dir(FSDPModule)} - {*dir(nn.Module)} if not name.startswith("_")}
# Defined elsewhere, in documents whose imports are cut off.
OF_PYTHON_AND_TORCH = {*dir(builtins), "F", "Any", "Enum", "NamedTuple", "Parameter", "cast"}

# What is passed by position or through another function, or named in running text.
MENTIONED = {
    "003": ("ModuleWrapPolicy", "size_based_auto_wrap_policy"),
    "004": (
        "DTensor.full_tensor",
        "FSDPModule.unshard",
        *(f"fully_shard({argument})" for argument in ("module", "mesh", "offload_policy", "shard_placement_fn")),
    ),
}


def main(folder: Path) -> None:
    """Read the documents in ``folder`` and write the list beside this file."""
    seeds: dict[str, set[str]] = {}
    for path in sorted(folder.glob("00?_*.txt")):
        number, text = path.name[:3], path.read_text()
        found = {*names_in_manual(text), *names_in_summary(text)}
        for tree in parsed(text) if "` [source]" not in text else ():
            found |= Names(tree).found
        for name in {*found, *MENTIONED.get(number, ())}:
            seeds.setdefault(name, set()).add(number)
    OUT.write_text("".join(f"{name} {' '.join(sorted(seeds[name]))}\n" for name in sorted(seeds)))


# ---- documents that are code


def parsed(text: str) -> Iterator[ast.Module]:
    """The code in a document, as trees: one file inside something else, or pieces of files in sequence."""
    fenced = re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    text = fenced[1] if fenced else text
    start = re.search(r"^import ", text, re.MULTILINE)
    if start:
        yield longest(text[start.start() :].splitlines())
        return
    for piece in pieces(text.splitlines()):
        yield longest(textwrap.dedent("\n".join(piece)).splitlines())


def pieces(lines: list[str]) -> Iterator[list[str]]:
    """Runs of lines that each begin with a function or class, and contain no line with less indentation than it."""
    current: list[str] = []
    indent = 0
    for line in lines:
        here = len(line) - len(line.lstrip())
        starts = re.match(r"\s*(class|def) ", line) is not None
        if line.strip() and (not current or here < indent or (starts and here <= indent)):
            if current:
                yield current
            current, indent = [], here
        current.append(line)
    yield current


def longest(lines: list[str]) -> ast.Module:
    """The tree of the leading lines that parse: documents end in the middle of a statement, or in prose."""
    for end in range(len(lines), 0, -1):
        try:
            return ast.parse("\n".join(lines[:end]))
        except SyntaxError:
            continue
    raise ValueError(f"a document must begin with code, but begins with {lines[:1]}")


def is_public(name: str) -> bool:
    """Whether a user may write ``name``."""
    return not name.startswith("_") or name in DOCUMENTED


class Names:
    """The names in one tree, in `found`: what it defines, and what it uses of the rest of the library."""

    def __init__(self, tree: ast.Module) -> None:
        nodes = list(ast.walk(tree))
        imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
        defined = {node.name for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        local = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        local |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        self._not_used = OF_PYTHON_AND_TORCH | defined | local
        self._imported: set[str] | None = set() if imports else None  # None: the imports are cut off
        for node in imports:
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith(LIBRARY)):
                self._imported |= {alias.name for alias in node.names if is_public(alias.name)}
        self.found = set(self._imported or ())
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and is_public(node.name):
                self._define_class(node)
            elif isinstance(node, ast.FunctionDef) and is_public(node.name):
                self._define(node.name, node)
        self._classes: dict[str, str] = {}  # variable or attribute -> the class that it is an object of
        for node in nodes:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Call):
                self._note_class(node, node.value.func)
        for node in nodes:
            if isinstance(node, ast.Attribute) and is_public(node.attr):
                self._use_attribute(node)
        for node in nodes:
            if isinstance(node, ast.Call):
                self._use_arguments(node)

    def _define_class(self, node: ast.ClassDef) -> None:
        self.found.add(node.name)
        is_dataclass = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
        is_test = node.name.startswith("Test")
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                self._define_arguments(node.name, part)
            elif isinstance(part, ast.FunctionDef) and (is_public(part.name) or part.name.startswith("__")):
                if not is_test or part.name.startswith("test_"):
                    self._define(f"{node.name}.{part.name}", part)
            elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                self.found.add(f"{node.name}({part.target.id})" if is_dataclass else f"{node.name}.{part.target.id}")
            elif isinstance(part, ast.Assign):
                names = [target.id for target in part.targets if isinstance(target, ast.Name)]
                self.found |= {f"{node.name}.{name}" for name in names if is_public(name)}
        attributes = [part for part in ast.walk(node) if isinstance(part, ast.Attribute)]
        stored = [part for part in attributes if isinstance(part.ctx, ast.Store) and ast.unparse(part.value) == "self"]
        self.found |= {f"{node.name}.{part.attr}" for part in stored if is_public(part.attr)}

    def _define(self, name: str, node: ast.FunctionDef) -> None:
        self.found.add(name)
        self._define_arguments(name, node)

    def _define_arguments(self, name: str, node: ast.FunctionDef) -> None:
        self.found |= {f"{name}({argument})" for argument in arguments_of(node.args) if argument != "self"}

    def _is_of_the_library(self, name: str) -> bool:
        if self._imported is not None:
            return name in self._imported
        return is_public(name) and name not in self._not_used

    def _note_class(self, node: ast.Assign | ast.AnnAssign, made_by: ast.expr) -> None:
        if isinstance(made_by, ast.Name) and made_by.id[0].isupper() and self._is_of_the_library(made_by.id):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._classes[ast.unparse(target)] = made_by.id

    def _use_attribute(self, node: ast.Attribute) -> None:
        owner = ast.unparse(node.value)
        if owner in self._classes and not hasattr(nn.Module, node.attr):
            self.found.add(f"{self._classes[owner]}.{node.attr}")
        elif owner[0].isupper() and owner.isidentifier() and self._is_of_the_library(owner):
            self.found |= {owner, f"{owner}.{node.attr}"}
        elif node.attr in METHODS_OF_FSDP2 and "FSDPModule" in self.found:
            self.found.add(f"FSDPModule.{node.attr}")

    def _use_arguments(self, node: ast.Call) -> None:
        called: ast.expr = node.func
        if ast.unparse(called) == "functools.partial":
            called = node.args[0]
        name = ""
        if isinstance(called, ast.Name) and self._is_of_the_library(called.id):
            name = called.id
            self.found.add(name)
        elif isinstance(called, ast.Attribute):
            name = f"{self._classes.get(ast.unparse(called.value), 'FSDPModule')}.{called.attr}"
        if name in self.found:
            self.found |= {f"{name}({keyword.arg})" for keyword in node.keywords if keyword.arg}


# ---- documents that are prose


def names_in_manual(text: str) -> Iterator[str]:
    """The names in the signatures of a manual, each a paragraph in fixed width, and in its lists of members."""
    signatures = list(
        re.finditer(r"^`(?:(class|static|property) )?([\w.]+)([(:](?:[^`])*)` ?(?:\[source\])?$", text, re.MULTILINE)
    )
    owner = ""
    for index, signature in enumerate(signatures):
        kind, path, rest = signature.groups()
        name = path.rpartition(".")[2]
        if kind == "class":
            owner = name
        else:
            name = f"{owner}.{name}"
        yield name
        if rest == "(value)":  # how the manual writes an enum
            end = signatures[index + 1].start() if index + 1 < len(signatures) else len(text)
            members = re.findall(r"^  \* `(\w+)`:", text[signature.end() : end], re.MULTILINE)
            yield from (f"{name}.{member}" for member in members)
        elif rest[0] == "(":
            rest = re.sub(r"<class '[\w.]+'>", "None", rest.partition(" -> ")[0])
            function = ast.parse(f"def f{rest}: pass").body[0]
            assert isinstance(function, ast.FunctionDef)
            yield from (f"{name}({argument})" for argument in arguments_of(function.args))


def names_in_summary(text: str) -> Iterator[str]:
    """The classes that a summary of a file says it defines; the file itself may be cut off before them."""
    for line in re.findall(r"^\*\*Classes defined\*\*: (.*)$", text, re.MULTILINE):
        yield from re.findall(r"`(\w+)`", line)


def arguments_of(arguments: ast.arguments) -> list[str]:
    """The names of all arguments except ``*args`` and ``**kwargs``."""
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
