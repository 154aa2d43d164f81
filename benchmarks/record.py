"""The results of a benchmark as a file: a header, then one run per line. Nothing else writes or reads results.

{
 "generated_by": "python benchmarks/run.py --repeat 5",
 "date": "2026-11-21T17:29:59+00:00",
 "settings": {"engines": ["fairshard", "fsdp2"], "repeat": 5},
 "runs": [
  {"engine": "fairshard", "repeat": 0, "ranks": [...]},
  {"engine": "fsdp2", "repeat": 0, "ranks": [...]}
 ]
}
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DIGITS = 6
"""Significant digits of a float: tables show four at most and stay the same. Counts and bytes are ints, and exact."""


def header(script: str, options: argparse.Namespace, argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Say what ran, when, and on what. ``argv`` are its arguments, those of the process by default."""
    return {
        "generated_by": command(script, sys.argv[1:] if argv is None else argv),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "settings": {key: _without_folder(value) for key, value in vars(options).items()},
    }


def result_file(*parts: str) -> Path:
    """The file of a measurement that names none."""
    return RESULTS / f"{'-'.join([str(datetime.date.today()), *parts])}.json"


def command(script: str, argv: Sequence[str]) -> str:
    """Show a call as it is typed in the root of a checkout."""
    path = Path(script).resolve().relative_to(ROOT).as_posix()
    return shlex.join(["python", path, *map(_without_folder, argv)])


def hardware() -> dict[str, Any]:
    """Describe this machine."""
    cpu = Path("/proc/cpuinfo").read_text().partition("model name\t: ")[2].partition("\n")[0]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": cpu, "visible_cpus": len(os.sched_getaffinity(0)), "memory_bytes": memory}


def write(path: Path, header: Mapping[str, Any], **runs: Sequence[Mapping[str, Any]]) -> None:
    """Write ``header``, one key a line, and each list of ``runs``, one run a line; floats to `DIGITS` digits.

    The first key is ``generated_by``: it tells a reader not to edit the file.
    """
    if next(iter(header)) != "generated_by":
        raise ValueError(
            f"A header must begin with the key `generated_by`, but begins with `{next(iter(header))}`. Put the command "
            "that measures there first."
        )
    lines = [f" {json.dumps(key)}: {_compact(value)}" for key, value in header.items()]
    for name, own in runs.items():
        body = ",\n".join(f"  {_compact(run)}" for run in own)
        lines.append(f" {json.dumps(name)}: " + (f"[\n{body}\n ]" if own else "[]"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read(path: Path) -> dict[str, Any]:
    """Return the header and the lists of runs of a file that `write` wrote, in one dict."""
    content = json.loads(path.read_text())
    if "generated_by" not in content:
        raise ValueError(
            f"{path} must have the key `generated_by`, which every benchmark writes, but has the keys {list(content)}. "
            "Pass a file that a benchmark wrote."
        )
    return content


def _compact(value: Any) -> str:
    return json.dumps(_rounded(value))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def _without_folder(value: Any) -> Any:
    """Keep the last part of an absolute path, also in ``--out=/a/b``: the rest means nothing on other machines."""
    if isinstance(value, Path):
        return value.name
    return re.sub(r"(^|=)/.*/", r"\1", value) if isinstance(value, str) else value
