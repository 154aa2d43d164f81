"""Writes docs/notes/clients.md: one row a case; cases that did not run this time keep their rows."""

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs" / "notes" / "clients.md"
PACKAGES = ("accelerate", "transformers", "lightning", "peft", "torchtitan", "torchao", "schedulefree")
HEAD = """# Other people's trainers

`make clients` makes an environment of its own with the packages below, runs each program on fairshard and on torch's
engine, each run in fresh processes on CPU ranks (gloo), with the same seeds and data, and writes this page.
`make clients ARGS="Trainer"` runs again the rows whose names contain a word, and keeps the others. The programs are in
`tests/clients/`.

The losses and norms of gradients (where the client reports them) of *all* steps are compared; a cell has the last ones.
FSDP1 cannot save a full state on CPU ranks, and from a sharded one accelerate loads no optimizer state into a new
optimizer of FSDP1: beside the wrapper torch's engine is FSDP2 where a second Trainer resumes, and saves a sharded state
elsewhere.

"""
COLUMNS = "| client | lines | ranks | fairshard: loss, norm | torch's engine |"


def write(cases, rows):
    """Write the page with ``rows``, (case, ours, theirs, outcome), and the present rows of all other ``cases``."""
    kinds = list(dict.fromkeys(case.changes for case in cases))
    cells = {**_present(), **{case.name: _cells(case, ours, theirs, said) for case, ours, theirs, said in rows}}
    kept = [(case.name, kinds.index(case.changes) + 1, *cells[case.name]) for case in cases if case.name in cells]
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in kept]
    PAGE.write_text(HEAD + _changes(kinds) + _where() + "\n".join([COLUMNS, "|" + "---|" * 5, *lines]) + "\n")


def _present():
    """The cells of each row, by the client: without the number of the lines, which the cases say."""
    if not PAGE.exists():
        return {}
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {name: cells for name, _, *cells in rows}


def _changes(kinds):
    """What a user of torch's engine changes, numbered."""
    lines = [", ".join(f"`{line}`" for line in kind) for kind in kinds]
    numbered = "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))
    return f"*Lines* are those that a user of torch's engine changes:\n\n{numbered}\n\n"


def _cells(case, ours, theirs, said):
    said += f": {case.why}" if said.startswith("equal within") else ""
    return [str(case.world_size), _curve(ours), said if said == "equal to the bit" else f"{_curve(theirs)}: {said}"]


def _curve(run):
    if run.curve is None:
        return "`" + run.error.replace("|", "/").replace("`", "'")[:120] + "`"
    return ", ".join(f"{run.curve[kind][-1]:.6g}" for kind in ("losses", "norms") if run.curve[kind])


def _where():
    versions = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    today = datetime.datetime.now(datetime.timezone.utc).date()
    return (
        f"Last written {today}: {_processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch "
        f"{torch.__version__};\n{versions}.\n\n"
    )


def _version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _processor():
    known = Path("/proc/cpuinfo")
    names = [line for line in known.read_text().splitlines() if line.startswith("model name")] if known.exists() else []
    return names[0].partition(": ")[2] if names else platform.processor() or platform.machine()
