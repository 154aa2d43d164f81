"""Rank 0's log of a run: ``metrics.jsonl``, the progress, ``--log``, and at its end the summary and ``run.png``."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fairshard.cli.runs import METRICS, PICTURE, read_lines, replace_file
from fairshard.utils.size_text import size_text

_LINES_WITHOUT_TERMINAL = 20
_MAX_SHOWN = 2000  # steps in a picture: a run may take months
_PROJECT = "fairshard"


@dataclass(frozen=True)
class StepMetrics:
    """One line of ``metrics.jsonl``; the fields are its keys, in this order.

    ``loss`` is the mean over all ranks. ``tokens`` counts tokens of all ranks since the start; ``tokens_per_s`` covers
    all ranks in this step. ``mem_bytes`` has one entry per rank. ``collectives`` and ``comm_bytes`` are rank 0's in
    this step. ``grad_norm`` is None if fp16 gradients overflowed and the step was skipped.
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


@dataclass(frozen=True)
class Summary:
    """The last line of ``metrics.jsonl``: means over all steps; ``peak_bytes`` has one entry per rank.

    ``bits_per_byte`` is the validation loss in other units; None if it is not known how many bytes a token stands for,
    or if the run ``has_own_loss``, whose units are not known.
    """

    val_loss: float
    tokens_per_s: float
    collectives_per_step: float
    bytes_per_step: float
    peak_bytes: tuple[int, ...]
    bits_per_byte: float | None = None
    has_own_loss: bool = False

    def lines(self, first_val_loss: float) -> list[str]:
        """Lines printed at the end of a run."""
        return [
            f"validation loss  {self.loss_text()}, from {first_val_loss:.3f} at the start",
            f"throughput       {self.tokens_per_s:,.0f} tokens/s over all ranks",
            f"communication    {self.collectives_per_step:.4g} collectives and "
            f"{size_text(self.bytes_per_step)} per step and rank",
            f"peak memory      {_by_rank(self.peak_bytes)}",
        ]

    def loss_text(self) -> str:
        """The last validation loss in nats, and in bits per byte if the bytes of a token are known.

        The user's own loss has no units: it need not be a cross-entropy.
        """
        if self.has_own_loss:
            return f"{self.val_loss:.3f}"
        if self.bits_per_byte is None:
            return f"{self.val_loss:.3f} nats per token"
        unit = "byte" if self.bits_per_byte == bits_per_byte(self.val_loss, 1.0) else "token"
        return f"{self.val_loss:.3f} nats per {unit} ({self.bits_per_byte:.3f} bits per byte)"


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """A loss in nats per token as bits per byte of the text, which compares any tokenizers."""
    return loss / math.log(2) / bytes_per_token


def summarize(
    lines: Sequence[Mapping[str, Any]], peak_bytes: tuple[int, ...], bytes_per_token: float | None, has_own_loss: bool
) -> tuple[Summary, float] | None:
    """The summary of a run from its lines and what is known besides, and the first validation loss.

    None if no step, or no validation, is left.
    """
    steps = [line for line in lines if "step_s" in line]
    validations = [float(line["val_loss"]) for line in lines if "val_loss" in line]
    if not (steps and validations):
        return None
    seconds, collectives, nbytes = (sum(line[key] for line in steps) for key in ("step_s", "collectives", "comm_bytes"))
    bits = None if bytes_per_token is None or has_own_loss else bits_per_byte(validations[-1], bytes_per_token)
    means = steps[-1]["tokens"] / seconds, collectives / len(steps), nbytes / len(steps)
    return Summary(validations[-1], *means, peak_bytes, bits, has_own_loss), validations[0]


class RunLog:
    """The files and the progress of one run, in an existing folder.

    The folder holds no run, or the one that goes on after step ``done``, whose lines up to that step are kept.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        done: int = 0,
        bytes_per_token: float | None = 1.0,
        has_own_loss: bool = False,
    ) -> None:
        self._folder = folder
        self._config = config
        self._units: dict[str, Any] = {"bytes_per_token": bytes_per_token, "has_own_loss": has_own_loss}
        self._num_steps = config["options"]["steps"]
        self._path = folder / METRICS
        kept = [line for line in read_lines(self._path) if done and line["step"] <= done]
        replace_file(self._path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = self._path.open("a", buffering=1, encoding="utf-8")
        is_silent = not sys.stderr.isatty()
        self._bar = tqdm(total=self._num_steps, initial=done, unit="step", dynamic_ncols=True, disable=is_silent)
        self._every = max(1, self._num_steps // _LINES_WITHOUT_TERMINAL) if is_silent else 0
        self._done, self._started = done, time.monotonic()
        name = config["options"]["log"]
        self._tracker = None if name is None else _tracker(name, folder, config, done)

    def say(self, text: str) -> None:
        """Print a line, so that it appears immediately, even in a pipe."""
        self._bar.write(text)
        sys.stdout.flush()

    def step(self, metrics: StepMetrics) -> None:
        """Record one training step."""
        entry = asdict(metrics)
        self._write(entry)
        text = f"loss {metrics.loss:.3f}, {metrics.tokens_per_s:,.0f} tokens/s, memory {_by_rank(metrics.mem_bytes)}"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()
        if self._every and (metrics.step % self._every == 0 or metrics.step == self._num_steps):
            elapsed = time.monotonic() - self._started
            left = elapsed / (metrics.step - self._done) * (self._num_steps - metrics.step)
            self.say(f"{self._at(metrics.step)}  {text}, {tqdm.format_interval(left)} left")
        if self._tracker is not None:
            self._tracker.log(_tracked(entry), metrics.step)

    def validation(self, step: int, val_loss: float) -> None:
        """Record the validation loss after ``step`` steps."""
        self._write({"step": step, "val_loss": val_loss})
        self.say(f"{self._at(step)}  validation loss {val_loss:.3f}")
        if self._tracker is not None:
            values = {"validation/loss": val_loss}
            if self._units["bytes_per_token"] is not None and not self._units["has_own_loss"]:
                values["validation/bits_per_byte"] = bits_per_byte(val_loss, self._units["bytes_per_token"])
            self._tracker.log(values, step)

    def saving(self, step: int) -> None:
        """Show that the checkpoint of ``step`` is being saved, in the background."""
        self.say(f"{self._at(step)}  saving a checkpoint")

    def finish(self, peak_bytes: tuple[int, ...]) -> None:
        """Write and print the summary, and draw the run; must be the last call."""
        lines = list(read_lines(self._path))
        found = summarize(lines, peak_bytes, **self._units)
        if found is None:  # all steps were done before, and their lines are lost
            self._write({"summary": {}})
            self.say(f"no summary       {METRICS} has lost the steps of this run")
            return
        summary, first_val_loss = found
        self._write({"summary": asdict(summary)})
        self._bar.close()
        stride = max(1, self._num_steps // _MAX_SHOWN)
        shown = [line for line in lines if "val_loss" in line or line["step"] % stride == 0]
        draw_run(self._folder / PICTURE, run_title(self._config), shown, summary)
        for line in summary.lines(first_val_loss):
            self.say(line)
        written = sorted(path.name for path in self._folder.iterdir())
        self.say(f"written          {self._folder}: {', '.join(written)}")

    def close(self) -> None:
        """Close the files; the run may have failed."""
        self._bar.close()
        self._file.close()
        if self._tracker is not None:
            self._tracker.finish()

    def _write(self, entry: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(entry, allow_nan=False) + "\n")

    def _at(self, step: int) -> str:
        return f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}"


def run_title(config: Mapping[str, Any]) -> str:
    """The title of a run's picture: its model, and its settings."""
    options = config["options"]
    accumulated = f" in {options['accumulate']} passes" if options["accumulate"] > 1 else ""
    extras = [name.replace("_", "-") for name in ("cpu_offload", "move_grads_to_cpu") if options[name]]
    settings = [
        f"world size {config['world_size']} on {config['device']}", options["engine"], options["precision"],
        options["optimizer"], *extras, f"learning rate {options['lr']:g}",
        f"batch {options['batch_size']}{accumulated}",
    ]  # fmt: skip
    return f"{config['model']}: {config['parameters']:,} parameters\n{', '.join(settings)}"


def draw_run(path: Path, title: str, lines: Sequence[Mapping[str, Any]], summary: Summary) -> None:
    """Draw a run into a PNG: its losses above, tokens/s and memory of the fullest rank below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here because it takes a second to import
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    steps = [line for line in lines if "step_s" in line]
    validations = [line for line in lines if "val_loss" in line]
    at = [line["step"] for line in steps]
    figure = Figure(figsize=(10, 7), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    loss, speed = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    loss.plot(
        at, [line["loss"] for line in steps], ".-", color="#3f6fb5", linewidth=0.8, markersize=2, label="training"
    )
    loss.plot(
        [line["step"] for line in validations], [line["val_loss"] for line in validations], "o--", color="#c8553d",
        label="validation",
    )  # fmt: skip
    loss.set_title(f"validation loss: {summary.loss_text()}", loc="left", fontweight="bold")
    loss.legend(frameon=False)
    speed.plot(at, [line["tokens_per_s"] for line in steps], ".-", color="#5d9c8b", linewidth=0.8, markersize=2)
    peak = size_text(max(summary.peak_bytes))
    speed.set_title(f"tokens/s: {summary.tokens_per_s:,.0f}; peak memory of a rank: {peak}", loc="left")
    speed.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    speed.set_xlabel("step")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, wrap=True)
    figure.savefig(path)


def _by_rank(sizes: tuple[int, ...]) -> str:
    if len(sizes) > 4:
        return f"{size_text(min(sizes))} to {size_text(max(sizes))} per rank"
    return " | ".join(map(size_text, sizes))


def _tracked(entry: Mapping[str, Any]) -> dict[str, float]:
    """The values of a step by the names under which they are sent."""
    names = {
        **{"loss": "train/loss", "lr": "train/learning_rate", "grad_norm": "train/grad_norm", "tokens": "train/tokens"},
        **{"tokens_per_s": "train/tokens_per_s", "step_s": "train/step_s"},
        **{"collectives": "communication/collectives", "comm_bytes": "communication/bytes"},
    }
    sent = {name: entry[key] for key, name in names.items() if entry[key] is not None}
    return sent | {f"memory/rank_{rank}": nbytes for rank, nbytes in enumerate(entry["mem_bytes"])}


class _TensorBoard:
    """Event files in ``tensorboard`` below the run's folder; a run that goes on removes later ones."""

    def __init__(self, folder: Path, config: Mapping[str, Any], done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1 if done else None)
        if not done:
            self._writer.add_text("config", "```\n" + json.dumps(config, indent=2) + "\n```")

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self._writer.close()


def _tracker(name: str, folder: Path, config: Mapping[str, Any], done: int) -> Any:
    """What sends values of a step to the package ``name``.

    The project is ``fairshard``, or what the package's own variable says (``WANDB_PROJECT``, ``TRACKIO_PROJECT``); the
    run has the name of its folder, and a run that goes on continues it.
    """
    plain = json.loads(json.dumps(config, default=str))
    if name == "tensorboard":
        return _TensorBoard(folder, plain, done)
    package: Any = importlib.import_module(name)  # trackio has the functions of wandb
    project = os.environ.get(f"{name.upper()}_PROJECT", _PROJECT)
    own = {"dir": str(folder), "id": folder.name} if name == "wandb" else {}
    package.init(project=project, name=folder.name, config=plain, resume="allow", **own)
    return package
