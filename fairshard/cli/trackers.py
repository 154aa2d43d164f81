"""``--log``: the metrics of a run in TensorBoard, Weights & Biases or Trackio, through their own packages.

Only rank 0 logs. The project is ``fairshard``, or what the package's own variable says (``WANDB_PROJECT``,
``TRACKIO_PROJECT``); the run has the name of its folder, and a resumed run continues it.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from fairshard.cli.metrics import StepMetrics

_PROJECT = "fairshard"


class Tracker(Protocol):
    """Somewhere that values of a step are sent to."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of ``step``."""

    def close(self) -> None:
        """Finish; nothing is sent afterwards."""


def tracked(metrics: StepMetrics) -> dict[str, float]:
    """The values of a step by the names under which they are sent."""
    values = {
        "train/loss": metrics.loss,
        "train/learning_rate": metrics.lr,
        "train/tokens": metrics.tokens,
        "train/tokens_per_s": metrics.tokens_per_s,
        "train/step_s": metrics.step_s,
        "communication/collectives": metrics.collectives,
        "communication/bytes": metrics.comm_bytes,
    }
    if metrics.grad_norm is not None:
        values["train/grad_norm"] = metrics.grad_norm
    values |= {f"memory/rank_{rank}": nbytes for rank, nbytes in enumerate(metrics.mem_bytes)}
    return values | {f"state/rank_{rank}": nbytes for rank, nbytes in enumerate(metrics.state_bytes)}


def tracker(name: str, folder: Path, config: Mapping[str, Any], done: int) -> Tracker:
    """The tracker ``name`` for the run in ``folder``, which goes on after step ``done``."""
    plain = json.loads(json.dumps(config, default=str))
    if name == "tensorboard":
        return _TensorBoard(folder, plain, done)
    return _Package(name, folder, plain)


class _TensorBoard:
    """Event files in ``tensorboard`` below the run's folder."""

    def __init__(self, folder: Path, config: Mapping[str, Any], done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1 if done else None)
        if not done:
            self._writer.add_text("config", "```\n" + json.dumps(config, indent=2) + "\n```")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See `Tracker`."""
        self._writer.close()


class _Package:
    """wandb, or trackio, which has the same functions."""

    def __init__(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        self._package: Any = importlib.import_module(name)
        project = os.environ.get(f"{name.upper()}_PROJECT", _PROJECT)
        own = {"dir": str(folder), "id": folder.name} if name == "wandb" else {}
        self._package.init(project=project, name=folder.name, config=config, resume="allow", **own)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._package.log(dict(values), step=step)

    def close(self) -> None:
        """See `Tracker`."""
        self._package.finish()
