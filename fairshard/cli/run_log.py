"""Rank 0's log of a run: its files and its progress."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from fairshard.cli.metrics import MetricsFile, StepMetrics, StepTotals, write_config
from fairshard.cli.options import RUN_FILES
from fairshard.cli.progress import Progress, say, summary_lines
from fairshard.cli.resume import kept_lines
from fairshard.cli.trace import TRACE_FILES
from fairshard.planning.summary import StateBytes


class RunLog:
    """The files and the progress of one run, in an existing folder.

    The folder holds no run, or the one to resume after step ``done``, whose lines up to that step are kept.
    """

    def __init__(self, folder: Path, num_steps: int, config: Mapping[str, Any], done: int | None = None) -> None:
        self._folder = folder
        self._totals = StepTotals()
        self._validations: dict[int, float] = {}
        path = folder / "metrics.jsonl"
        lines = None if done is None else kept_lines(path, done or -1)
        for line in lines or ():
            if "val_loss" in line:
                self._validations[line["step"]] = line["val_loss"]
            else:
                self._totals.add(StepMetrics(**{**line, "mem_bytes": tuple(line["mem_bytes"])}))
        if done is None:
            write_config(folder / "config.json", config)
        self._stack = contextlib.ExitStack()
        self._file = self._stack.enter_context(MetricsFile(path, lines))
        self._progress = self._stack.enter_context(Progress(num_steps, done or 0))

    def step(self, metrics: StepMetrics) -> None:
        """Record one training step."""
        self._totals.add(metrics)
        self._file.step(metrics)
        self._progress.step(metrics)

    def validation(self, step: int, val_loss: float) -> None:
        """Record the validation loss after ``step`` steps."""
        self._validations[step] = val_loss
        self._file.validation(step, val_loss)
        self._progress.validation(step, val_loss)

    def finish(self, peak_bytes: tuple[int, ...], places: StateBytes, copy_wait_s: float) -> None:
        """Write and print the summary, and draw the loss; must be the last call."""
        from fairshard.cli.curve import draw_loss  # here because matplotlib takes a second to import

        first, *_, last = self._validations.values()
        summary = self._totals.summary(last, peak_bytes, places, copy_wait_s)
        self._file.summary(summary)
        self._stack.close()
        title = f"fairshard train, {self._folder.name}"
        draw_loss(self._folder / "loss.png", title, self._totals.losses, self._validations)
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
