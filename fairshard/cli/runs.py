"""The folder of a run, which is the run: a command that names it goes on where the run has stopped."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairshard.cli.options import OptionError, TrainOptions, flag, refused
from fairshard.version import __version__

CHECKPOINTS, METRICS, CONFIG, PICTURE = "checkpoints", "metrics.jsonl", "config.json", "run.png"

_READING = OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError
# Options in which a command may differ from the run that it continues: another value of any other one would make it
# another run. The model's folder and token files may be elsewhere; there may be more steps.
_FREE = (
    *("nproc", "device", "threads", "out", "save_every", "keep_last", "tokens", "hf", "resume", "resume_from"),
    *("max_restarts", "trace", "timeout", "grace", "signal", "log", "sample", "steps", "lr_steps"),
)


def chosen_options(given: Mapping[str, Any]) -> TrainOptions:
    """The options ``given`` of a new run, or those of the run to continue: the one in ``out``, or the newest.

    Raises:
        OptionError: an option is invalid, there is no such run, it has finished, or it has another option.
    """
    asked = TrainOptions.of(given)
    is_resumed = asked.resume or asked.resume_from is not None
    folder = asked.out or (_newest_run() if is_resumed else None)
    if folder is None or not (is_resumed or (folder / CONFIG).exists()):
        return asked
    config = read_config(folder)
    with refused(f"the run cannot be continued: {folder / CONFIG} cannot be read: ", *_READING):
        saved = TrainOptions.of({**config["options"], "out": folder})
    chosen = {name: getattr(asked, name) for name in (given if is_resumed else asdict(asked))}
    for name, value in chosen.items():
        if name not in _FREE and value != getattr(saved, name):
            raise OptionError(
                f"{flag(name)} is {getattr(saved, name)} in the run in {folder}: continue it with the same command or "
                "with --resume, which has the run's own options. For another run pass a new --out."
            )
    steps = chosen.get("steps", saved.steps)
    if steps < saved.steps:
        raise OptionError(f"--steps is {saved.steps} in the run in {folder}, and can only grow, but is {steps}.")
    if asked.lr_steps not in (None, saved.schedule_steps):
        raise OptionError(f"--lr-steps is {saved.schedule_steps} in the run in {folder}, but is {asked.lr_steps}.")
    if steps == saved.steps and asked.resume_from is None and _is_finished(folder):
        raise OptionError(
            f"the run in {folder} has finished: there is nothing to resume. Pass --steps above {steps} to go on "
            "beyond, or start a new run."
        )
    free = {name: value for name, value in chosen.items() if name in _FREE}
    if asked.resume_from is not None:
        free |= {"max_restarts": 0}  # the two exclude each other
    longer = {"lr_steps": saved.lr_steps if steps == saved.steps else saved.schedule_steps}
    fixed = {"steps": steps, "out": folder, "resume": True, "resume_from": asked.resume_from}
    return replace(saved, **{**free, **longer, **fixed})


def check_new(out: Path) -> None:
    """Require that no run without a config is in ``out``.

    Raises:
        OptionError: there is one.
    """
    paths = (out / METRICS, out / PICTURE, out / CHECKPOINTS / "latest")  # a start that failed leaves none of them
    found = [path.name for path in paths if path.is_file() and path.stat().st_size]
    if found and not os.path.exists(out / CONFIG):
        raise OptionError(f"--out {out} holds a run without its {CONFIG} ({', '.join(found)}). Pass a new folder.")


def make_run_folder(out: Path | None) -> Path:
    """Create ``out``, or ``runs/<UTC time>``, with a suffix ``-2``, ``-3``, ... if that name is taken."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        return out
    name = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    number = 1
    while True:
        folder = Path("runs", name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
        number += 1


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of the run's ``config.json``.

    Raises:
        OptionError: it is missing or damaged.
    """
    path = folder / CONFIG
    if not os.path.isfile(path):
        raise OptionError(f"--resume needs a run, but {path} does not exist. Pass its folder with --out.")
    with refused(f"the run cannot be continued: {path} cannot be read: ", *_READING):
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise TypeError(f"it holds {config!r:.60}")
        return config


def write_config(folder: Path, entries: Mapping[str, Any]) -> None:
    """Write ``config.json``: ``entries`` of this start, its time, and the versions of the software."""
    versions = {
        "fairshard": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    config = {**entries, "started": started, "command": sys.argv, "versions": versions}
    replace_file(folder / CONFIG, json.dumps(config, indent=2, default=str) + "\n")


def replace_file(path: Path, text: str) -> None:
    """Write a file durably: after a kill, or with a full disk, it has its old contents or all of the new.

    A run whose ``config.json`` is cut off could not be resumed.
    """
    beside = path.with_suffix(".tmp")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The entries of ``metrics.jsonl`` that have a step, without those that are incomplete or damaged."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                entry = json.loads(line)
                int(entry["step"])
                float(entry["val_loss"] if "val_loss" in entry else entry["loss"])
            except (ValueError, TypeError, KeyError, RecursionError):
                continue
            yield entry


def _is_finished(folder: Path) -> bool:
    """Whether the last line of the log is a summary, and the checkpoint that `latest` names is there, if there is one.

    Otherwise the ranks say what is missing.
    """
    path, pointer = folder / METRICS, folder / CHECKPOINTS / "latest"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    has_lost = pointer.is_file() and not (pointer.parent / pointer.read_text(errors="replace").strip()).is_dir()
    return bool(lines) and lines[-1].startswith('{"summary"') and not has_lost


def _newest_run() -> Path:
    runs = [path.parent for path in Path("runs").glob(f"*/{CONFIG}")]
    if not runs:
        raise OptionError("--resume needs a run, but runs/ here holds none. Pass its folder with --out.")
    return max(runs, key=lambda folder: (folder / CONFIG).stat().st_mtime)
