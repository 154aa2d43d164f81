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

A cell has the loss of each step, and after the bar the norm of the gradients, where the client reports it. *Lines* are
those that a user of torch's engine changes. FSDP1 cannot save a full state on CPU ranks, and from a sharded one
accelerate loads no optimizer state into a new optimizer of FSDP1: beside the wrapper torch's engine is FSDP2 where a
second Trainer resumes, and saves a sharded state elsewhere.

"""
COLUMNS = "| client | ranks | lines that change | fairshard: losses \\| norms | torch's engine | outcome | seconds |"


def write(cases, rows):
    """Write the page with ``rows``, (case, ours, theirs, outcome), and the present rows of all other ``cases``."""
    lines = _present()
    for case, ours, theirs, said in rows:
        lines[case.name] = _row(case, ours, theirs, said)
    kept = [lines[case.name] for case in cases if case.name in lines]
    PAGE.write_text(HEAD + _where() + "\n".join([COLUMNS, "|" + "---|" * 7, *kept]) + "\n")


def _present():
    if not PAGE.exists():
        return {}
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {line.split("|")[1].strip(): line for line in rows}


def _row(case, ours, theirs, said):
    changed = "<br>".join(f"`{line}`" for line in case.changes)
    seconds = f"{ours.seconds:.0f}, {theirs.seconds:.0f}"
    said += f": {case.why}" if said.startswith("equal within") else ""
    cells = [case.name, str(case.world_size), changed, _curve(ours), _curve(theirs), said, seconds]
    return "| " + " | ".join(cells) + " |"


def _curve(run):
    if run.curve is None:
        return "`" + run.error.replace("|", "/").replace("`", "'")[:240] + "`"
    numbers = [" ".join(f"{value:.6g}" for value in run.curve[kind]) for kind in ("losses", "norms")]
    return " \\| ".join(filter(None, numbers))


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
