"""Bugs of synchronisation, planted into the engine one at a time: a wait, an event or a held reference is removed.

A *site* is a place in the source of ``fairshard/`` that waits, records an event, or keeps a tensor because a device
may still use it. `sites` finds all of them, so that none is left out of the table in ``test_planted.py``. `planted`
replaces the code of one function by the same code without that site.
"""

import ast
import contextlib
import functools
import importlib
import inspect
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import fairshard
from fairshard.nn.data_parallel.in_place.module import UnshardHandle
from fairshard.params.gathered import Gathered
from fairshard.params.shard_grad import GradTransfers
from fairshard.utils.streams import Event, Stream
from fairshard.utils.transfers import Chain, Transfer
from fairshard.views.rows import JointGather

PACKAGE = Path(fairshard.__file__).parent
HOLDERS = ("_reads",)
"""Attributes that keep tensors only because a device may still use their memory."""


@dataclass(frozen=True)
class Site:
    """One place: ``module:qualified name:kind``, with a number if the function has several of that kind."""

    name: str
    line: int
    column: int

    @property
    def module(self):
        """Name of the module."""
        return self.name.split(":")[0]

    @property
    def function(self):
        """Qualified name of the function at module or class level that contains the place."""
        return self.name.split(":")[1]


class _Finder(ast.NodeVisitor):
    """Collects ``(kind, node, qualified name)`` of one module."""

    def __init__(self):
        self.found = []
        self._path = []
        self._is_in_function = False

    def visit_ClassDef(self, node):
        self._inside(node, node.name)

    def visit_FunctionDef(self, node):
        if self._is_in_function:
            self.generic_visit(node)
            return
        self._is_in_function = True
        self._inside(node, node.name)
        self._is_in_function = False

    def visit_Call(self, node):
        kind = kind_of(node)
        if kind is not None:
            self.found.append((kind, node, ".".join(self._path)))
        self.generic_visit(node)

    def _inside(self, node, name):
        self._path.append(name)
        self.generic_visit(node)
        self._path.pop()


def kind_of(call):
    """What ``call`` does to the order of work: wait, record, hold, or None."""
    name = _name_of(call)
    if isinstance(call.func, ast.Attribute):
        if name in ("wait", "synchronize") and not _is_super(call.func.value):
            return "wait"
        if name == "record":
            return "record"
        if name == "append" and getattr(call.func.value, "attr", None) in HOLDERS:
            return "hold"
        return None
    if name == "now":
        return "record"
    return None


def _name_of(node):
    function = getattr(node, "func", None)
    return getattr(function, "attr", None) or getattr(function, "id", None)


def _is_super(node):
    return _name_of(node) == "super"


@functools.cache
def sites():
    """All sites, by name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        finder = _Finder()
        finder.visit(ast.parse(path.read_text()))
        counts = {}
        for kind, node, qualified in finder.found:
            key = f"{module}:{qualified}:{kind}"
            counts[key] = counts.get(key, 0) + 1
            name = key if counts[key] == 1 else f"{key}-{counts[key]}"
            found[name] = Site(name, node.lineno, node.col_offset)
    return found


@contextlib.contextmanager
def planted(name):
    """Remove the site ``name`` from the engine in this process."""
    site = sites()[name]
    module = importlib.import_module(site.module)
    holder = module
    for part in site.function.split("."):
        holder = inspect.getattr_static(holder, part)
    function = inspect.unwrap(getattr(holder, "fget", None) or getattr(holder, "__func__", holder))
    tree = _Remover(site).visit(ast.parse(Path(module.__file__).read_text()))
    code = _code_of(compile(ast.fix_missing_locations(tree), module.__file__, "exec"), site.function.split("."))
    before = function.__code__
    function.__globals__.update(_unwaited=unwaited, _no_event=Event)
    function.__code__ = code
    try:
        yield
    finally:
        function.__code__ = before


def _code_of(code, path):
    for name in path:
        code = next(const for const in code.co_consts if getattr(const, "co_name", None) == name)
    return code


class _Remover(ast.NodeTransformer):
    """Removes the wait, the event or the reference at ``site``."""

    def __init__(self, site):
        self._place = site.line, site.column

    def visit_Call(self, node):
        self.generic_visit(node)
        kind = kind_of(node)
        if kind is None or (node.lineno, node.col_offset) != self._place:
            return node
        if kind == "wait":
            return ast.Call(ast.Name("_unwaited", ast.Load()), [node.func.value, *node.args], [])
        if kind == "record":
            return ast.Call(ast.Name("_no_event", ast.Load()), [], [])
        return ast.Constant(None)


def unwaited(thing, *_events):
    """The result of ``thing.wait()`` without the wait."""
    if isinstance(thing, (Stream, Event, torch.Event, GradTransfers, UnshardHandle, dist.Work)):
        return None
    if isinstance(thing, AsyncCollectiveTensor):
        return thing.elem
    if isinstance(thing, Gathered):
        inner, thing.transfer = thing.transfer, None
        return None if inner is None else unwaited(inner)
    assert isinstance(thing, Transfer), f"no way to skip the wait of {thing!r}"
    if isinstance(thing, JointGather):
        inner, thing._transfer = thing._transfer, None
        return None if inner is None else unwaited(inner)
    if isinstance(thing, Chain):
        return unwaited(thing._start(unwaited(thing._first)))
    thing.works = ()
    return thing.wait()
