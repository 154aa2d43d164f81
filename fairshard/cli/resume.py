"""Resuming a run: read its options back, and drop the metrics that it wrote after the checkpoint."""

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
# Options that may differ from the resumed run's; any other change would make it a different run.
_FREE = (
    *("nproc", "device", "threads", "out", "save_every", "keep_last", "memory_every"),
    *("resume", "resume_from", "max_restarts", "trace"),
)


def chosen_options(arguments: argparse.Namespace) -> TrainOptions:
    """The options of a parsed command line, or of the run that it resumes.

    Raises:
        OptionError: an option is invalid, or there is no such run.
    """
    options = parsed_options(arguments)
    return resumed_options(options) if options.resume or options.resume_from is not None else options


def resumed_options(given: TrainOptions) -> TrainOptions:
    """The options of the run that ``given`` resumes, updated with the options of ``given`` that may differ.

    Raises:
        OptionError: there is no such run, or another option of ``given`` differs.
    """
    folder = given.out or _newest_run()
    saved = _read_options(folder)
    if given.resume_from is None and _is_finished(folder / METRICS):
        raise OptionError(f"the run in {folder} has finished: there is nothing to resume. Start a new one.")
    defaults = asdict(TrainOptions())
    for name, value in asdict(given).items():
        if name not in _FREE and value != defaults[name] and value != getattr(saved, name):
            flag = name.replace("_", "-")
            raise OptionError(f"--{flag} is {getattr(saved, name)} in the run in {folder}: leave it out to resume.")
    free = {name: getattr(given, name) for name in _FREE if getattr(given, name) != defaults[name]}
    return replace(saved, **{**free, "out": folder, "resume": True})


def restarted_options(options: TrainOptions) -> TrainOptions:
    """``options``, set to resume if torch's elastic launcher restarted this rank after a failure.

    A run without ``out`` cannot be found again. A run that failed before it wrote anything starts from scratch.
    """
    is_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0
    if not is_restart or options.out is None or not (options.out / "config.json").exists():
        return options
    return replace(options, resume=True, resume_from=None)


def kept_lines(path: Path, step: int) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` up to ``step``, without an incomplete last line."""
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
        raise OptionError("--resume needs a run, but runs/ here holds none. Pass its folder with --out.")
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
        raise OptionError(f"--resume needs a run, but {path} does not exist. Pass its folder with --out.") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise OptionError(f"--resume needs the options of the run, but {path} cannot be read: {error}") from error
