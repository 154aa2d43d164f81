"""Going on with a run: its options are read back, and what it wrote after its checkpoint is dropped."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from fairshard.cli.options import OptionError, TrainOptions, parsed_options

CHECKPOINTS, METRICS = "checkpoints", "metrics.jsonl"
# May differ from the run that is resumed; all else would make it another run.
_FREE = (
    *("nproc", "device", "threads", "out", "save_every", "keep_last"),
    *("resume", "resume_from", "max_restarts", "trace"),
)


def chosen_options(arguments: argparse.Namespace) -> TrainOptions:
    """The options in a parsed command line, or those of the run that it asks to resume.

    Raises:
        OptionError: one is wrong, or there is no such run.
    """
    options = parsed_options(arguments)
    return resumed_options(options) if options.resume or options.resume_from is not None else options


def resumed_options(given: TrainOptions) -> TrainOptions:
    """The options of the run that ``given`` asks to resume, with those of ``given`` that may differ.

    Raises:
        OptionError: there is no such run, or ``given`` asks for something else than it did.
    """
    folder = given.out or _newest_run()
    saved = _read_options(folder)
    if given.resume_from is None and _is_finished(folder / METRICS):
        raise OptionError(f"the run in {folder} has finished: there is nothing to resume. Start a new one.")
    defaults = asdict(TrainOptions())
    for name, value in asdict(given).items():
        if name not in _FREE and value != defaults[name] and value != getattr(saved, name):
            flag = name.replace("_", "-")
            raise OptionError(f"--{flag} is {getattr(saved, name)} in the run in {folder}: leave it out to go on.")
    free = {name: getattr(given, name) for name in _FREE if getattr(given, name) != defaults[name]}
    return replace(saved, **{**free, "out": folder, "resume": True})


def restarted_options(options: TrainOptions) -> TrainOptions:
    """``options``, resuming where torch's elastic launcher has started this rank again after a failure.

    Without a folder of its own a run cannot be found again; one that failed before it wrote anything starts anew.
    """
    is_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0
    if not is_restart or options.out is None or not (options.out / "config.json").exists():
        return options
    return replace(options, resume=True, resume_from=None)


def kept_lines(path: Path, step: int) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` up to ``step``; a line that was being written does not count."""
    kept: list[dict[str, Any]] = []
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            break
        if "summary" not in entry and entry["step"] <= step:
            kept.append(entry)
    return kept


def _is_finished(path: Path) -> bool:
    """Whether the last line is the summary."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return bool(lines) and lines[-1].startswith('{"summary"')


def _newest_run() -> Path:
    runs = [path.parent for path in Path("runs").glob("*/config.json")]
    if not runs:
        raise OptionError("--resume needs a run, but there is none below runs/ here. Pass its folder with --out.")
    return max(runs, key=lambda folder: (folder / "config.json").stat().st_mtime)


def _read_options(folder: Path) -> TrainOptions:
    path = folder / "config.json"
    try:
        entries: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))["options"]
        known = {field.name for field in fields(TrainOptions)}
        values = {name: value for name, value in entries.items() if name in known}
        for name in ("data", "out"):
            values[name] = None if values.get(name) is None else Path(os.fspath(values[name]))
        return TrainOptions(**values)
    except FileNotFoundError:
        raise OptionError(f"--resume needs a run, but there is no {path}. Pass the folder of one with --out.") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise OptionError(f"--resume needs the options of the run, but {path} cannot be read: {error}") from error
