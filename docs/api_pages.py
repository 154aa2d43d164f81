"""Writes the pages below ``reference/api``: every public name once, from the ``__all__`` of the public modules.

Sphinx calls `write` before it reads the pages; ``python docs/api_pages.py`` writes them by hand. `PAGES` decides which
page a name is on. A name of a public module that no page names is on the page of its module.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).parent / "reference" / "api"

NN = "fairshard.nn"
UTILS = "fairshard.utils"


@dataclass(frozen=True)
class Page:
    """One page: its title, what stands above the names, and the names by module; no names: the rest of the module."""

    file: str
    title: str
    text: str
    names: dict[str, tuple[str, ...]]


PAGES = (
    Page(
        "fairshard",
        "The package",
        "`import fairshard` imports nothing else: each name is loaded when it is first used.",
        {"fairshard": ()},
    ),
    Page(
        "wrapper",
        "The wrapper",
        "`FSDP` is short for `FullyShardedDataParallel`. Guide: [](../../guides/wrapping.md).",
        {
            NN: (
                *("FullyShardedDataParallel", "ShardingStrategy", "MixedPrecision", "BackwardPrefetch", "CPUOffload"),
                *("TrainingState", "register_forward_method", "get_fsdp_instances"),
            )
        },
    ),
    Page(
        "fully_shard",
        "fully_shard",
        "Guide: [](../../guides/fully_shard.md).",
        {
            NN: (
                *("fully_shard", "FSDPModule", "UnshardHandle", "MixedPrecisionPolicy", "OffloadPolicy"),
                *("CPUOffloadPolicy", "DataParallelMeshDims", "ShardPlacementResult", "register_fsdp_forward_method"),
                *("AllGather", "ReduceScatter", "share_comm_ctx"),
            )
        },
    ),
    Page("nn", "For both entry points", "What works with the wrapper and with `fully_shard`.", {NN: ()}),
    Page(
        "wrap",
        "Wrapping and planning",
        "Guide: [](../../guides/wrapping.md).",
        {"fairshard.nn.wrap": (), "fairshard.planning.model_summary": (), "fairshard.planning.summary": ()},
    ),
    Page(
        "optim",
        "Optimizers",
        "Guides: [](../../guides/offload.md), [](../../guides/muon.md).",
        {"fairshard.optim": ()},
    ),
    Page("checkpoint", "Checkpoints", "Guide: [](../../guides/checkpoints.md).", {"fairshard.checkpoint": ()}),
    Page(
        "state_dicts",
        "Forms of state dicts",
        "Guide: [](../../guides/checkpoints.md#state-dicts-of-the-model).",
        {
            NN: (
                *("StateDictType", "StateDictSettings", "StateDictConfig", "FullStateDictConfig"),
                *("ShardedStateDictConfig", "LocalStateDictConfig", "OptimStateDictConfig"),
                *("FullOptimStateDictConfig", "ShardedOptimStateDictConfig", "LocalOptimStateDictConfig"),
                *("OptimStateKeyType", "clean_tensor_name"),
            ),
            f"{UTILS}.span_tensor": (),
        },
    ),
    Page(
        "observe",
        "Observing",
        "Guide: [](../../guides/passes.md#observing-a-pass).",
        {NN: ("observe", "Observation", "UnitEvent", "Phase", "compare_ranks"), "fairshard.observe.timeline": ()},
    ),
    Page(
        "comm_hooks",
        "Communication hooks",
        "Guide: [](../../guides/strategies.md).",
        {"fairshard.nn.comm_hooks": ()},
    ),
    Page(
        "integrations",
        "Other people's trainers",
        "Guides: [](../../guides/integrations/accelerate.md), [](../../guides/integrations/lightning.md), "
        "[](../../guides/integrations/torchtitan.md).",
        {f"fairshard.integrations.{name}": () for name in ("accelerate", "lightning", "torchtitan")},
    ),
    Page(
        "fairscale",
        "Fairscale's helpers",
        "Under fairscale's names, for code that imports them.",
        {
            f"{UTILS}.{name}": ()
            for name in ("reduce_scatter_bucketer", "parallel", "containers", "storage", "tensors")
        },
    ),
    Page(
        "training_loop",
        "The training loop of the command line",
        "The same options: [](../../command_line.md).",
        {"fairshard.cli.loop": ()},
    ),
    Page(
        "collectives",
        "Collectives",
        "The collectives of the engine, and their counters.",
        {f"{UTILS}.collectives": ()},
    ),
)

# Members that torch calls, not users.
HOOKS = {"forward", "extra_repr", "backward"}

# Members of public classes that other parts of fairshard call, not users.
INTERNAL = {
    "CPUOptimizer": {"gradients"},
    "CustomPolicy": {"overrides"},
    "FairshardStrategy": {
        *("register_strategies", "precision_plugin", "setup", "model_sharded_context", "lightning_module_state_dict"),
        *("optimizer_state", "load_checkpoint"),
    },
    "MixedPrecisionPolicy": {"precision"},
    "ModuleWrapPolicy": {"overrides"},
    "RowBlocks": {"block_of"},
    "ShardingStrategy": {"is_hybrid", "reshards_after_forward"},
}

# On the page of errors.
ERRORS = "fairshard.errors"


@dataclass(frozen=True, eq=False)
class Unimported:
    """A function without arguments of a module that cannot be imported here."""

    doc: str


def modules() -> dict[str, ModuleType]:
    """The public modules that there are, in the order of the pages; the package itself last."""
    names = dict.fromkeys(module for page in PAGES for module in page.names)
    found = {name: _imported(name) for name in names if _spec(name)}
    found["fairshard"] = found.pop("fairshard")
    return found


def _spec(name: str) -> ModuleSpec | None:
    """Where the module is, or None."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:  # of a package above it
        return None


def _imported(name: str) -> ModuleType:
    """The module; without the package that it integrates, a module of functions that have its docstrings alone."""
    try:
        return importlib.import_module(name)
    except ImportError:
        spec = _spec(name)
        assert spec is not None
        assert spec.origin is not None
        module = ModuleType(name)
        for node in ast.parse(Path(spec.origin).read_text()).body:
            if isinstance(node, ast.FunctionDef):
                vars(module)[node.name] = Unimported(ast.get_docstring(node) or "")
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                module.__all__ = ast.literal_eval(node.value)
        return module


def public_names(module: ModuleType) -> list[str]:
    """The names that ``module`` offers."""
    return list(module.__all__)


@dataclass(frozen=True)
class Entry:
    """One name on a page."""

    module: str
    name: str
    value: Any

    @property
    def path(self) -> str:
        """The name with its module."""
        return f"{self.module}.{self.name}"


def entries() -> dict[str, list[Entry]]:
    """The names of each page, by its file: each object once, under the first name that it has."""
    placed = {(module, name): page.file for page in PAGES for module, names in page.names.items() for name in names}
    home = {module: page.file for page in PAGES for module, names in page.names.items() if not names}
    found: dict[str, list[Entry]] = {page.file: [] for page in PAGES}
    seen: set[int] = set()
    for module_name, module in modules().items():
        ordered = sorted(public_names(module), key=lambda name: _place(module_name, name))
        for name in ordered:
            value = getattr(module, name)
            if inspect.ismodule(value) or _is_alias(name, value, module) or id(value) in seen:
                continue
            if getattr(value, "__module__", None) == ERRORS:
                continue
            seen.add(id(value))
            found[placed.get((module_name, name), home[module_name])].append(Entry(module_name, name, value))
    return found


def _place(module: str, name: str) -> int:
    """The position of ``name`` in the list of its page; names without one keep their order, behind."""
    listed = [each for page in PAGES for each in page.names.get(module, ())]
    return listed.index(name) if name in listed else len(listed)


def _is_alias(name: str, value: Any, module: ModuleType) -> bool:
    """Whether ``module`` offers the same object under its own name too."""
    own = getattr(value, "__name__", name)
    return own != name and own in public_names(module)


def text_of(page: Page, names: list[Entry]) -> str:
    """The page as Markdown."""
    lines = [f"# {page.title}", "", page.text, "", "| name | |", "|---|---|"]
    double = {entry.name for entry in names if sum(other.name == entry.name for other in names) > 1}
    for entry in names:
        shown = f"{entry.module.rpartition('.')[2]}.{entry.name}" if entry.name in double else entry.name
        lines.append(f"| [`{shown}`](#{entry.path}) | {_first_sentence(entry)} |")
    lines += ["", "```{eval-rst}"]
    for entry in names:
        lines += [*_directive(entry), ""]
    return "\n".join([*lines, "```", ""])


def own_members(cls: type) -> list[str]:
    """Public members of ``cls`` that fairshard defines, its own before those of its base classes."""
    own = [base for base in cls.__mro__ if base.__module__.startswith("fairshard")]
    names = dict.fromkeys(name for base in own for name in _in_order(base))
    return [name for name in names if name not in HOOKS | INTERNAL.get(cls.__name__, set())]


def _in_order(cls: type) -> Iterator[str]:
    """Public members with a docstring, and the members of an enum, in the order of the source."""
    for name, value in vars(cls).items():
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        is_documented = callable(function) or isinstance(function, property | functools.cached_property)
        if isinstance(value, cls) or (is_documented and function.__doc__ and not name.startswith("_")):
            yield name


def _first_sentence(entry: Entry) -> str:
    if isinstance(entry.value, Unimported):
        return entry.value.doc.split("\n\n")[0].replace("\n", " ")
    if not (inspect.isclass(entry.value) or inspect.isroutine(entry.value)):
        return "a constant"
    doc = inspect.getdoc(entry.value) or ""
    doc = re.sub(r":\w+:`", "`", doc.split("\n\n")[0])  # roles of Sphinx
    return doc.replace("\n", " ").replace("``", "`").replace("|", "\\|")


def _directive(entry: Entry) -> Iterator[str]:
    if inspect.isclass(entry.value):
        yield f".. autoclass:: {entry.path}"
        if members := own_members(entry.value):
            yield f"   :members: {', '.join(members)}"
        if "__call__" in vars(entry.value):
            yield "   :special-members: __call__"
    elif inspect.isroutine(entry.value):
        yield f".. autofunction:: {entry.path}"
    elif isinstance(entry.value, Unimported):
        yield f".. py:function:: {entry.path}()"
        yield ""
        yield from (f"   {line}" for line in entry.value.doc.splitlines())
    else:
        shown = sorted(entry.value) if isinstance(entry.value, dict) else entry.value
        yield f".. py:data:: {entry.path}"
        yield f"   :value: {shown!r}"


def write(*_: object) -> None:
    """Write all pages, and remove those that are no more."""
    found = entries()
    FOLDER.mkdir(exist_ok=True)
    texts = {f"{page.file}.md": text_of(page, found[page.file]) for page in PAGES if found[page.file]}
    files = "\n".join(name.removesuffix(".md") for name in texts)
    index = "# API\n\nEvery public name, once. What is not here may change in any version.\n\n"
    texts["index.md"] = f"{index}```{{toctree}}\n:maxdepth: 1\n\n{files}\n```\n"
    for old in FOLDER.glob("*.md"):
        if old.name not in texts:
            old.unlink()
    for name, text in texts.items():
        path = FOLDER / name
        if not path.exists() or path.read_text() != text:  # an unchanged file is not built again
            path.write_text(text)


if __name__ == "__main__":
    write()
    sys.stdout.write(f"written: {FOLDER}\n")
