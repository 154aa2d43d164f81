"""Rank 0's log of a run: its files and its progress."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from fairshard.cli.metrics import (
    MetricsFile,
    StepMetrics,
    StepTotals,
    bits_per_byte,
    read_metrics,
    write_config,
)
from fairshard.cli.options import PICTURE, RUN_FILES
from fairshard.cli.progress import Progress, say, summary_lines
from fairshard.cli.resume import kept_lines
from fairshard.cli.trace import TRACE_FILES
from fairshard.cli.trackers import Tracker, tracked
from fairshard.planning.summary import StateBytes


def run_title(config: Mapping[str, Any]) -> tuple[str, str]:
    """Two lines for a picture of the run: its model and its settings."""
    options = config["options"]
    ranks = f"{config['world_size']} rank{'s' if config['world_size'] > 1 else ''}"
    accumulated = f" in {options['accumulate']} passes" if options["accumulate"] > 1 else ""
    extras = [name.replace("_", "-") for name in ("cpu_offload", "move_grads_to_cpu") if options[name]]
    settings = [
        f"{ranks} on {config['device']}", options["engine"], options["precision"], options["optimizer"], *extras,
        f"learning rate {options['lr']:g}", f"batch {options['batch_size']}{accumulated}",
    ]  # fmt: skip
    return f"{config['model']}: {config['parameters']:,} parameters", ", ".join(settings)


class RunLog:
    """The files and the progress of one run, in an existing folder.

    The folder holds no run, or the one to resume after step ``done``, whose lines up to that step are kept.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        done: int | None = None,
        bytes_per_token: float | None = 1.0,
        tracker: Tracker | None = None,
        has_own_loss: bool = False,
    ) -> None:
        self._folder = folder
        self._title = run_title(config)
        self._bytes_per_token = bytes_per_token
        self._has_own_loss = has_own_loss
        self._tracker = tracker
        self._totals = StepTotals()
        self._validations: dict[int, float] = {}
        path = folder / "metrics.jsonl"
        lines = None if done is None else kept_lines(path, done or -1)
        for line in lines or ():
            with contextlib.suppress(TypeError, ValueError):  # a damaged line
                if "val_loss" in line:
                    self._validations[line["step"]] = float(line["val_loss"])
                else:
                    self._totals.add(read_metrics(line))
        if done is None:
            write_config(folder / "config.json", config)
        self._stack = contextlib.ExitStack()
        self._file = self._stack.enter_context(MetricsFile(path, lines))
        self._progress = self._stack.enter_context(Progress(config["options"]["steps"], done or 0))
        if tracker is not None:
            self._stack.callback(tracker.close)

    def step(self, metrics: StepMetrics) -> None:
        """Record one training step."""
        self._totals.add(metrics)
        self._file.step(metrics)
        self._progress.step(metrics)
        if self._tracker is not None:
            self._tracker.log(metrics.step, tracked(metrics))

    def validation(self, step: int, val_loss: float) -> None:
        """Record the validation loss after ``step`` steps."""
        self._validations[step] = val_loss
        self._file.validation(step, val_loss)
        self._progress.validation(step, val_loss)
        if self._tracker is not None:
            bits = None if self._has_own_loss else self._bytes_per_token
            more = {} if bits is None else {"validation/bits_per_byte": bits_per_byte(val_loss, bits)}
            self._tracker.log(step, {"validation/loss": val_loss, **more})

    def saving(self, step: int) -> None:
        """Show that the checkpoint of ``step`` is being saved."""
        self._progress.saving(step)

    def finish(self, peak_bytes: tuple[int, ...], places: StateBytes, copy_wait_s: float) -> None:
        """Write and print the summary, and draw the run; must be the last call."""
        from fairshard.cli.run_picture import draw_run  # here because matplotlib takes a second to import

        if not (self._validations and self._totals.losses):  # all steps were done before, and their lines are lost
            self._stack.close()
            say("no summary       metrics.jsonl has lost the steps of this run")
            return
        first, last = (self._validations[choose(self._validations)] for choose in (min, max))
        units = self._bytes_per_token, self._has_own_loss
        summary = self._totals.summary(last, peak_bytes, places, copy_wait_s, *units)
        self._file.summary(summary)
        self._stack.close()
        draw_run(self._folder / PICTURE, self._title, self._totals, self._validations, summary)
        for line in summary_lines(summary, first):
            say(line)
        written = [name for name in (*RUN_FILES, *TRACE_FILES) if (self._folder / name).exists()]
        say(f"written          {self._folder}: {', '.join(written)}")

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
