"""The files of a run: ``config.json``, ``metrics.jsonl``, and the folder that holds them."""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from fairshard.planning.summary import StateBytes
from fairshard.version import __version__

_MAX_SHOWN = 2000


@dataclass(frozen=True)
class StepMetrics:
    """One line of ``metrics.jsonl``; the fields are its keys, in this order.

    ``loss`` is the mean over all ranks. ``tokens`` counts tokens of all ranks since the start; ``tokens_per_s`` covers
    all ranks in this step. ``mem_bytes`` has one entry per rank. ``collectives`` and ``comm_bytes`` are rank 0's in
    this step. ``grad_norm`` is None if fp16 gradients overflowed and the step was skipped. ``state_bytes`` are
    the shards, gradients and optimizer state of each rank before the optimizer steps, on device and host together.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    tokens: int
    tokens_per_s: float
    step_s: float
    mem_bytes: tuple[int, ...]
    collectives: int
    comm_bytes: int
    state_bytes: tuple[int, ...] = ()


def read_metrics(line: Mapping[str, Any]) -> StepMetrics:
    """The `StepMetrics` of a line of ``metrics.jsonl``, which another version may have written.

    Raises:
        TypeError, ValueError: it is damaged.
    """
    values = {field.name: line[field.name] for field in fields(StepMetrics) if field.name in line}
    for name, value in values.items():
        values[name] = tuple(map(int, value)) if name.endswith("_bytes") and name != "comm_bytes" else value
        if not isinstance(values[name], (int, float, tuple)) and (name, value) != ("grad_norm", None):
            raise ValueError(f"`{name}` is {value!r:.80}")
    return StepMetrics(**values)


@dataclass(frozen=True)
class Summary:
    """The last line of ``metrics.jsonl``: means over all steps; ``peak_bytes`` has one entry per rank.

    ``device_bytes``, ``pinned_bytes`` and ``pageable_bytes`` are rank 0's shards, gradients and optimizer state in
    each kind of memory; ``copy_wait_s`` is its time per step spent waiting for copies between host and device.
    ``bits_per_byte`` is the validation loss in other units; None if it is not known how many bytes a token stands for,
    or if the run ``has_own_loss``, whose units are not known.
    """

    val_loss: float
    tokens_per_s: float
    collectives_per_step: float
    bytes_per_step: float
    peak_bytes: tuple[int, ...]
    device_bytes: int
    pinned_bytes: int
    pageable_bytes: int
    copy_wait_s: float
    bits_per_byte: float | None = None
    has_own_loss: bool = False


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """A loss in nats per token as bits per byte of the text, which compares any tokenizers."""
    return loss / math.log(2) / bytes_per_token


class StepTotals:
    """Sums over the steps of a run, and the loss of each.

    Of the rest of a step, ``shown`` keeps one of every ``stride``, at most `_MAX_SHOWN`: a run may take months.
    """

    def __init__(self) -> None:
        self.losses = array("d")
        self.shown: list[StepMetrics] = []
        self._stride = 1
        self._seconds = 0.0
        self._tokens = 0
        self._num_collectives = 0
        self._comm_nbytes = 0

    def add(self, step: StepMetrics) -> None:
        """Add the next step."""
        self.losses.append(step.loss)
        if (step.step - 1) % self._stride == 0:
            self.shown.append(step)
            if len(self.shown) > _MAX_SHOWN:
                self.shown = self.shown[::2]
                self._stride *= 2
        self._seconds += step.step_s
        self._tokens = step.tokens
        self._num_collectives += step.collectives
        self._comm_nbytes += step.comm_bytes

    def summary(
        self,
        val_loss: float,
        peak_bytes: tuple[int, ...],
        places: StateBytes,
        copy_wait_s: float,
        bytes_per_token: float | None = 1.0,
        has_own_loss: bool = False,
    ) -> Summary:
        """Summarize the run; ``copy_wait_s`` is of all steps."""
        number = len(self.losses)
        known = None if has_own_loss else bytes_per_token
        return Summary(
            val_loss=val_loss,
            tokens_per_s=self._tokens / self._seconds,
            collectives_per_step=self._num_collectives / number,
            bytes_per_step=self._comm_nbytes / number,
            peak_bytes=peak_bytes,
            device_bytes=places.device,
            pinned_bytes=places.pinned,
            pageable_bytes=places.pageable,
            copy_wait_s=copy_wait_s / number,
            bits_per_byte=None if known is None else bits_per_byte(val_loss, known),
            has_own_loss=has_own_loss,
        )


class MetricsFile:
    """Appends one JSON object per line; each line is in the file when the call returns.

    The file must be new, unless ``kept``, the lines of a resumed run, replaces its contents.
    """

    def __init__(self, path: Path, kept: Sequence[Mapping[str, Any]] | None = None) -> None:
        if kept is not None:
            replace_file(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("x" if kept is None else "a", buffering=1, encoding="utf-8")

    def step(self, metrics: StepMetrics) -> None:
        """Write one training step."""
        self._write(asdict(metrics))

    def validation(self, step: int, val_loss: float) -> None:
        """Write the validation loss after ``step`` steps."""
        self._write({"step": step, "val_loss": val_loss})

    def summary(self, summary: Summary) -> None:
        """Write the last line."""
        self._write({"summary": asdict(summary)})

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _write(self, entry: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(entry, allow_nan=False) + "\n")


def make_run_folder(out: Path | None) -> Path:
    """Create ``out``, or ``runs/<UTC time>``, with a suffix ``-2``, ``-3``, ... if that name is taken."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        return out
    name = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    number = 1
    while True:
        folder = Path("runs", name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder


def write_config(path: Path, entries: Mapping[str, Any]) -> None:
    """Write ``config.json``: ``entries``, the start time, and the versions of the software."""
    versions = {
        "fairshard": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    config = {**entries, "started": started, "command": sys.argv, "versions": versions}
    text = json.dumps(config, indent=2, default=str) + "\n"
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, "a run is never overwritten", str(path))
    replace_file(path, text)


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
