"""Resuming a run: read its options back, and drop the metrics that it wrote after the checkpoint."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from fairshard.cli.flags import parsed_options
from fairshard.cli.option_error import OptionError
from fairshard.cli.options import TrainOptions
from fairshard.cli.ranks import Ranks
from fairshard.cli.text import TextPlan, checksum

CHECKPOINTS, METRICS, CONFIG = "checkpoints", "metrics.jsonl", "config.json"
# Options that may differ from the resumed run's; any other change would make it a different run. The text may be
# elsewhere, but not another one (`check_text`); so may the model's folder; there may be more steps.
_FREE = (
    *("nproc", "device", "threads", "out", "save_every", "keep_last", "data", "tokens", "hf"),
    *("resume", "resume_from", "max_restarts", "trace", "timeout", "grace", "signal", "log", "sample"),
)


def chosen_options(arguments: argparse.Namespace) -> TrainOptions:
    """The options of a parsed command line, or of the run that it resumes.

    Raises:
        OptionError: an option is invalid, or there is no such run.
    """
    options = parsed_options(arguments)
    is_resumed = options.resume or options.resume_from is not None
    return resumed_options(options, arguments.steps) if is_resumed else options


def resumed_options(given: TrainOptions, steps: int | None = None) -> TrainOptions:
    """The options of the run that ``given`` resumes, updated with the options of ``given`` that may differ.

    ``steps``: train to this step, which is beyond the run's own last one. The schedule of the learning rate stays.

    Raises:
        OptionError: there is no such run, it has no such step, or another option of ``given`` differs.
    """
    folder = given.out or _newest_run()
    saved = _longer(_read_options(folder), steps, folder)
    if Ranks.from_environment() is not None:
        saved = replace(saved, nproc=None, max_restarts=0)  # torchrun decides both
    elif given.resume_from is not None:
        saved = replace(saved, max_restarts=0)  # the two exclude each other
    if given.resume_from is not None:
        _check_saved(given.resume_from, folder)
    elif _is_finished(folder / METRICS, saved.steps):
        raise OptionError(
            f"the run in {folder} has finished: there is nothing to resume. Pass --steps above {saved.steps} to go on "
            "beyond, or start a new run."
        )
    defaults = asdict(TrainOptions())
    for name, value in asdict(given).items():
        if name not in (*_FREE, "steps") and value != defaults[name] and value != getattr(saved, name):
            flag = name.replace("_", "-")
            raise OptionError(f"--{flag} is {getattr(saved, name)} in the run in {folder}: leave it out to resume.")
    free = {name: getattr(given, name) for name in _FREE if getattr(given, name) != defaults[name]}
    return replace(saved, **{**free, "out": folder, "resume": True})


def restarted_options(options: TrainOptions) -> TrainOptions:
    """``options``, set to resume if torch's elastic launcher restarted this rank after a failure.

    It also restarts ranks when hosts come or go (``--nnodes MIN:MAX``), without counting. A run without ``out`` cannot
    be found again. A run that failed before it wrote anything starts from scratch.

    Raises:
        OptionError: the launcher's run has other options, or has finished.
    """
    if options.out is None or not (options.out / CONFIG).exists():
        return options
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0:
        return replace(options, resume=True, resume_from=None)
    if not options.resume and elastic_job() is not None and _read(options.out).get("elastic_job") == elastic_job():
        return resumed_options(replace(options, resume=True), options.steps)
    return options


def elastic_job() -> str | None:
    """The name of torch's elastic job that this rank belongs to; None if it has none of its own."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return None if name in ("", "none") else name


def check_text(options: TrainOptions, plan: TextPlan) -> None:
    """Compare the text of ``plan`` with that of the run to resume.

    Raises:
        OptionError: it is another text.
    """
    if not options.resume or options.out is None:
        return
    began = _read(options.out).get("text") or {}
    if not isinstance(began, dict):
        raise OptionError(f"--resume needs the text of the run, but {options.out / CONFIG} is damaged: {began!r:.80}.")
    found = text_entry(plan)
    differing = [name for name in found if name != "source" and name in began and began[name] != found[name]]
    if differing:
        name = differing[0]
        raise OptionError(
            f"the text must be that of the run in {options.out}, but {plan.source} has {name} = {found[name]} instead "
            f"of {began[name]}. Restore the text, or start a new run."
        )


def text_entry(plan: TextPlan) -> dict[str, Any]:
    """What ``config.json`` keeps of the text."""
    return {
        "source": plan.source,
        "train_bytes": plan.train_nbytes,
        "validation_bytes": plan.validation_nbytes,
        "crc32": f"{checksum(plan):08x}",
    }


def write_steps(options: TrainOptions) -> None:
    """Write to ``config.json`` how far the resumed run goes now, if that has changed."""
    assert options.out is not None
    path = options.out / CONFIG
    config = _read(options.out)
    steps = {"steps": options.steps, "lr_steps": options.lr_steps}
    if {name: config["options"].get(name) for name in steps} != steps:
        config["options"].update(steps)
        from fairshard.cli.metrics import replace_file  # here because it imports the engine

        replace_file(path, json.dumps(config, indent=2) + "\n")


def kept_lines(path: Path, step: int) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` up to ``step``, without those that are incomplete or damaged."""
    kept: list[dict[str, Any]] = []
    for line in _lines(path):
        try:
            entry = json.loads(line)
            if "summary" not in entry and entry["step"] <= step:
                kept.append(entry)
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
    return kept


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def _longer(saved: TrainOptions, steps: int | None, folder: Path) -> TrainOptions:
    """``saved`` with that many ``steps``, and the learning rate of its own."""
    if steps is None or steps == saved.steps:
        return saved
    if steps < saved.steps:
        raise OptionError(
            f"--steps is {saved.steps} in the run in {folder}, and can only grow: pass more than {steps}, or leave it "
            "out to resume."
        )
    return replace(saved, steps=steps, lr_steps=saved.schedule_steps)


def _is_finished(path: Path, steps: int) -> bool:
    """Whether the last line is a summary of that many steps."""
    lines = _lines(path)
    if not lines or not lines[-1].startswith('{"summary"'):
        return False
    return max((entry["step"] for entry in kept_lines(path, steps)), default=0) >= steps


def _check_saved(step: int, folder: Path) -> None:
    from fairshard.checkpoint.step_names import STEP, step_name, step_of  # here because it imports the engine

    if (folder / CHECKPOINTS / step_name(step)).is_dir():
        return
    found = sorted((folder / CHECKPOINTS).glob("step-*"))
    steps = ", ".join(str(step_of(path.name)) for path in found if STEP.fullmatch(path.name)) or "none"
    raise OptionError(f"--resume-from must be a step with a checkpoint, but the run in {folder} has {steps}.")


def _newest_run() -> Path:
    runs = [path.parent for path in Path("runs").glob("*/config.json")]
    if not runs:
        raise OptionError("--resume needs a run, but runs/ here holds none. Pass its folder with --out.")
    return max(runs, key=lambda folder: (folder / "config.json").stat().st_mtime)


def _read(folder: Path) -> dict[str, Any]:
    """The contents of the run's ``config.json``.

    Raises:
        OptionError: it is missing or damaged.
    """
    path = folder / CONFIG
    if not os.path.isfile(path):  # a pipe would block
        raise OptionError(f"--resume needs a run, but {path} does not exist. Pass its folder with --out.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise TypeError(f"it holds {config!r:.80}")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise OptionError(f"--resume needs the options of the run, but {path} cannot be read: {error}") from error
    return config


def _read_options(folder: Path) -> TrainOptions:
    path, log = folder / CONFIG, folder / METRICS
    config = _read(folder)
    if log.exists() and not log.is_file():
        raise OptionError(f"--resume goes on with {log}, which must be a file, but is not. Remove it.")
    try:
        entries: Mapping[str, Any] = config["options"]
        known = {field.name for field in fields(TrainOptions)}
        values = {name: value for name, value in entries.items() if name in known}
        for name in ("data", "out", "hf"):
            values[name] = None if values.get(name) is None else Path(os.fspath(values[name]))
        if values.get("tokens") is not None:
            values["tokens"] = tuple(Path(os.fspath(path)) for path in values["tokens"])
        return TrainOptions(**values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise OptionError(f"--resume needs the options of the run, but {path} cannot be read: {error}") from error
