"""The options of ``fairshard train``: one frozen dataclass, its flags, and every check on them."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import signal as signals
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import torch

from fairshard.cli.local_path import local_path, one_line, problem_with_output
from fairshard.cli.machine import Sizes, least_nbytes, max_processes, shortage
from fairshard.cli.text import TextError, TextPlan, plan_text
from fairshard.utils.device import check_device_type, default_device_type, device_count
from fairshard.utils.host import visible_cpus

PRECISIONS = ("fp32", "bf16", "fp16")
COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # for mixed precision; fp32 does not need it
OPTIMIZERS = ("cpu-adamw", "adamw", "sgd")
SIGNALS = ("USR1", "USR2", "HUP")
RUN_FILES = ("config.json", "metrics.jsonl", "loss.png")

_MAX_S = 1_000_000
_CPU_TIMEOUT_S = 120.0
_AT_LEAST_ONE = (
    "nproc", "steps", "batch_size", "accumulate", "context", "layers", "dim", "heads", "eval_every", "threads",
    "keep_last", "resume_from", "trace", "lr_steps",
)  # fmt: skip
# Far more than anyone uses, and small enough that nothing overflows or takes hours to refuse.
_AT_MOST: dict[str, float] = {
    **dict.fromkeys(("steps", "lr_steps", "eval_every", "save_every", "keep_last", "warmup", "trace"), 10**9),
    **dict.fromkeys(("batch_size", "accumulate", "context", "dim", "heads", "memory_every"), 10**7),
    "resume_from": 10**9,
    **{"layers": 10_000, "max_restarts": 10_000, "bucket_cap_mb": 10**6, "lr": 1e38, "weight_decay": 10**6},
}
_AT_LEAST_ZERO = (
    "warmup", "seed", "weight_decay", "clip", "bucket_cap_mb", "save_every", "memory_every",
    "max_restarts",
)  # fmt: skip


class OptionError(ValueError):
    """Invalid options; the message is one line for the user."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class OneLineParser(argparse.ArgumentParser):
    """``ArgumentParser`` that raises ``OptionError`` instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise ``OptionError`` with argparse's message."""
        raise OptionError(f"{message}. See {self.prog} --help.")


@dataclass(frozen=True)
class TrainOptions:
    """Options of a run; each field is the flag of the same name.

    Raises:
        OptionError: a value is invalid for any number of ranks.
    """

    nproc: int | None = None
    device: str = "auto"
    threads: int | None = None
    data: Path | None = None
    out: Path | None = None
    seed: int = 0
    layers: int = 4
    dim: int = 128
    heads: int = 4
    context: int = 64
    steps: int = 450
    batch_size: int = 32
    accumulate: int = 1
    lr: float = 4e-3
    weight_decay: float = 0.1
    warmup: int | None = None
    clip: float = 1.0
    eval_every: int = 100
    precision: str = "fp32"
    bucket_cap_mb: float = 25.0
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    move_grads_to_cpu: bool | None = None
    optimizer: str = "adamw"
    save_every: int = 50
    keep_last: int = 3
    memory_every: int = 0
    resume: bool = False
    resume_from: int | None = None
    max_restarts: int = 0
    trace: int | None = None
    timeout: float | None = None
    grace: float = 30.0
    signal: str | None = None
    lr_steps: int | None = None

    def __post_init__(self) -> None:
        self._check_types()
        for name in _AT_LEAST_ONE:
            self._check_least(name, 1)
        for name in _AT_LEAST_ZERO:
            self._check_least(name, 0)
        for name, most in _AT_MOST.items():
            if (getattr(self, name) or 0) > most:
                raise OptionError(f"--{name.replace('_', '-')} must be at most {most}, but is {getattr(self, name)}.")
        for name in ("nproc", "threads"):
            if (getattr(self, name) or 0) > max_processes():
                raise OptionError(
                    f"--{name} must be at most {max_processes()} on this machine of {visible_cpus()} CPUs, but is "
                    f"{getattr(self, name)}."
                )
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise OptionError(f"--lr must be a positive number, but is {self.lr}.")
        if self.seed >= 2**63:
            raise OptionError(f"--seed must be below 2**63, but is {self.seed}.")
        if self.dim % self.heads:
            raise OptionError(f"--dim must be a multiple of --heads = {self.heads}, but is {self.dim}.")
        if self.lr_steps is None and self.warmup_steps > self.steps:
            raise OptionError(f"--warmup must be at most --steps = {self.steps}, but is {self.warmup}.")
        if self.warmup_steps > self.schedule_steps:
            raise OptionError(f"--warmup must be at most --lr-steps = {self.lr_steps}, but is {self.warmup}.")
        for name in ("timeout", "grace"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and 0 < value <= _MAX_S):
                raise OptionError(f"--{name} must be a number of seconds above 0 and at most {_MAX_S}, but is {value}.")
        if self.signal is not None and self.signal not in SIGNALS:
            raise OptionError(f"--signal must be one of {', '.join(SIGNALS)}, but is {self.signal}.")
        if self.trace is not None and self.trace > self.steps:
            raise OptionError(f"--trace must be at most --steps = {self.steps}, but is {self.trace}.")
        if self.precision not in PRECISIONS:
            raise OptionError(f"--precision must be one of {', '.join(PRECISIONS)}, but is {self.precision}.")
        _check_device_type(self.device)
        if self.optimizer not in OPTIMIZERS:
            raise OptionError(f"--optimizer must be one of {', '.join(OPTIMIZERS)}, but is {self.optimizer}.")
        if self.max_restarts and self.resume_from is not None:
            raise OptionError(
                "--max-restarts continues from the newest checkpoint, which with --resume-from may belong to the "
                "dropped steps. Leave one of them out."
            )
        if self.cpu_offload and self.move_grads_to_cpu is False and self.optimizer != "cpu-adamw":
            raise OptionError(
                "--cpu-offload --no-move-grads-to-cpu needs --optimizer cpu-adamw, which fetches the gradients, but "
                f"it is {self.optimizer}."
            )

    @property
    def device_type(self) -> str:
        """``"cpu"`` or the type of an accelerator; ``auto`` is resolved on this host."""
        return default_device_type() if self.device == "auto" else self.device

    @property
    def warmup_steps(self) -> int:
        """Steps in which the learning rate rises: ``warmup``, or a tenth of its schedule, at least 20."""
        steps = self.schedule_steps
        return min(steps, max(20, steps // 10)) if self.warmup is None else self.warmup

    @property
    def schedule_steps(self) -> int:
        """Steps of the learning rate's schedule; after it the rate stays."""
        return self.steps if self.lr_steps is None else self.lr_steps

    @property
    def stop_signals(self) -> tuple[signals.Signals, ...]:
        """The signals after which the step is saved and the run ends."""
        own = () if self.signal is None else (signals.Signals[f"SIG{self.signal}"],)
        return (signals.SIGTERM, *own)

    @property
    def timeout_s(self) -> float | None:
        """Seconds that a rank waits for the others: ``timeout``, or 120 on the CPU; None is the backend's default."""
        return _CPU_TIMEOUT_S if self.timeout is None and self.device_type == "cpu" else self.timeout

    @property
    def num_ranks(self) -> int:
        """Ranks to launch on this host: ``nproc``, or one per accelerator, or 2 without."""
        if self.nproc is not None:
            return self.nproc
        return 2 if self.device_type == "cpu" else device_count(self.device_type)

    def _check_types(self) -> None:
        """Check the types of values that were read from a file."""
        for field in fields(self):
            value, kinds = getattr(self, field.name), str(field.type)
            allowed = {"int": int, "float": (int, float), "bool": bool, "str": str, "Path": Path}
            names = [name.strip() for name in kinds.split("|")]
            is_none = value is None and "None" in names
            if not is_none and not any(_is_a(value, allowed.get(name)) for name in names):
                raise OptionError(f"--{field.name.replace('_', '-')} must be of the type {kinds}, but is {value!r}.")

    def _check_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is not None and not (math.isfinite(value) and value >= least):
            raise OptionError(f"--{name.replace('_', '-')} must be at least {least}, but is {value}.")


def check_options(options: TrainOptions, world_size: int, local_size: int) -> TextPlan:
    """Check the options against the ranks, the host and its files; all ranks of a host get the same answer.

    Called before any rank starts; under torchrun, on every rank before the process group is created.

    Returns: the plan of the text, which the checks build anyway.

    Raises:
        OptionError: the first problem found.
    """
    _check_packages()
    _check_device(options, local_size)
    _check_batch(options, world_size)
    if options.out is not None and not options.resume:
        _check_out(options.out)
    try:
        plan = plan_text(options.data, options.seed, options.context)
    except TextError as error:
        raise OptionError(str(error)) from error
    _check_memory(options, plan, world_size, local_size)
    return plan


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``fairshard train``, with the defaults of ``TrainOptions``."""
    ranks = parser.add_argument_group("ranks")
    _add(ranks, "--nproc", int, "N", "ranks to launch on this machine (default: one per accelerator, or 2)")
    _add(ranks, "--device", str, "TYPE", "cpu, cuda, xpu, ...; auto: the accelerator if there is one (default: auto)")
    _add(ranks, "--threads", int, "N", "CPU threads of each rank (default: visible CPUs / ranks here)")
    _add(ranks, "--timeout", float, "S", "seconds that a rank waits for the others (default: 120 on the CPU)")
    files = parser.add_argument_group("files")
    _add(files, "--data", local_path, "PATH", "file or folder of text (default: the standard library's sources)")
    _add(files, "--out", local_path, "DIR", "folder for the run's files (default: runs/<UTC time>)")
    _add(files, "--trace", int, "STEP", "draw the timeline of that step: trace.png, and trace.json for Chrome")
    _add(files, "--seed", int, "N", "seed of weights, split and batches (default: %(default)s)")
    checkpoints = parser.add_argument_group("checkpoints")
    _add(checkpoints, "--save-every", int, "N", "steps between checkpoints, 0 for none (default: %(default)s)")
    _add(checkpoints, "--keep-last", int, "N", "checkpoints to keep (default: %(default)s)")
    _add(checkpoints, "--memory-every", int, "N", "steps between copies in host memory (default: 0, none)")
    checkpoints.add_argument(
        "--resume", action="store_true", help="continue the run in --out, or the newest run, with its own options"
    )
    _add(checkpoints, "--resume-from", int, "STEP", "continue from that checkpoint instead of the newest")
    _add(checkpoints, "--max-restarts", int, "N", "times to restart after a failed rank (default: %(default)s)")
    _add(checkpoints, "--grace", float, "S", "seconds to save the step after SIGTERM (default: %(default)g)")
    _add(checkpoints, "--signal", str, None, "another signal that means the same as SIGTERM", SIGNALS)
    model = parser.add_argument_group("model")
    _add(model, "--layers", int, "N", "transformer blocks, each a unit (default: %(default)s)")
    _add(model, "--dim", int, "N", "width (default: %(default)s)")
    _add(model, "--heads", int, "N", "attention heads (default: %(default)s)")
    _add(model, "--context", int, "N", "bytes in a sequence (default: %(default)s)")
    training = parser.add_argument_group("training")
    _add(training, "--steps", int, "N", f"optimizer steps; with --resume, more of them (default: {TrainOptions.steps})")
    training.set_defaults(steps=None)  # with --resume, none given is the run's own number
    _add(training, "--batch-size", int, "N", "sequences per step, over all ranks (default: %(default)s)")
    _add(training, "--accumulate", int, "N", "passes per step, each with a part of its batch (default: %(default)s)")
    _add(training, "--lr", float, "X", "peak learning rate (default: %(default)s)")
    _add(training, "--weight-decay", float, "X", "weight decay of the optimizer (default: %(default)s)")
    _add(training, "--warmup", int, "N", "steps up to the peak, then a cosine (default: --lr-steps / 10, at least 20)")
    _add(training, "--lr-steps", int, "N", "steps after which the learning rate stays (default: --steps)")
    _add(training, "--clip", float, "X", "largest gradient norm, 0 for no clipping (default: %(default)s)")
    _add(training, "--eval-every", int, "N", "steps between validations (default: %(default)s)")
    engine = parser.add_argument_group("engine")
    _add(engine, "--precision", str, None, "compute dtype; weights stay fp32 (default: %(default)s)", PRECISIONS)
    _add(engine, "--bucket-cap-mb", float, "X", "size of a bucket of gradients, 0 for none (default: %(default)s)")
    engine.add_argument(
        "--reshard-after-forward",
        action=argparse.BooleanOptionalAction,
        default=TrainOptions.reshard_after_forward,
        help="free a unit's full weights between forward and backward (default: yes)",
    )
    offload = parser.add_argument_group("offload")
    offload.add_argument("--cpu-offload", action="store_true", help="keep the weights' shards in host memory")
    offload.add_argument(
        "--move-grads-to-cpu",
        action=argparse.BooleanOptionalAction,
        help="copy reduced gradients to host memory as they arrive (default: as --cpu-offload)",
    )
    _add(offload, "--optimizer", str, None, "cpu-adamw steps during the copies (default: %(default)s)", OPTIMIZERS)


def parsed_options(arguments: argparse.Namespace) -> TrainOptions:
    """Options of a parsed command line."""
    values = {field.name: getattr(arguments, field.name) for field in fields(TrainOptions)}
    if values["steps"] is None:
        del values["steps"]
    return TrainOptions(**values)


def _add(
    group: argparse._ArgumentGroup,
    flag: str,
    kind: Callable[[str], Any],
    metavar: str | None,
    text: str,
    choices: Sequence[str] | None = None,
) -> None:
    default = getattr(TrainOptions, flag[2:].replace("-", "_"))
    group.add_argument(flag, type=kind, metavar=metavar, default=default, help=text, choices=choices)


def _check_packages() -> None:
    missing = [name for name in ("matplotlib", "tqdm") if importlib.util.find_spec(name) is None]
    if missing:
        raise OptionError(f"{' and '.join(missing)} must be installed. Run: pip install 'fairshard[cli]'")


def _check_batch(options: TrainOptions, world_size: int) -> None:
    batch, passes = options.batch_size, options.accumulate
    share = world_size * passes
    what = f"{world_size} ranks" + (f" x {passes} passes" if passes > 1 else "")
    if batch < share:
        raise OptionError(f"--batch-size {batch} cannot feed {what}: it must be at least {share}.")


def _check_device(options: TrainOptions, local_size: int) -> None:
    kind = options.device_type
    if kind == "cpu":
        return
    count = device_count(kind)
    if not count:
        raise OptionError(f"--device {kind} needs an accelerator of this type, but torch sees none. Pass --device cpu.")
    if local_size > count:
        raise OptionError(
            f"each rank needs its own accelerator, but there are {local_size} ranks and {count} of type {kind} here."
        )


def _check_device_type(device: str) -> None:
    if device == "auto":
        return
    try:
        check_device_type("--device", device)
    except ValueError as error:
        raise OptionError(str(error)) from error


def _check_memory(options: TrainOptions, plan: TextPlan, world_size: int, local_size: int) -> None:
    """Raise if this machine cannot hold what the ranks take at least."""
    is_mapped = len(plan.train) == len(plan.validation) == 1
    text_nbytes = 0 if is_mapped else plan.train_nbytes + plan.validation_nbytes
    batch_size = options.batch_size // (world_size * options.accumulate)
    sizes = Sizes(options.layers, options.dim, options.context, batch_size, options.device_type == "cpu")
    problem = shortage(local_size * least_nbytes(sizes, world_size, text_nbytes))
    if problem is not None:
        raise OptionError(
            f"{local_size} ranks with this model, batch and text need {problem}. Pass a smaller --nproc, --layers, "
            "--dim, --context, --batch-size or --data."
        )


def _check_out(out: Path) -> None:
    """Raise if the folder holds a run, or cannot be created or written."""
    if os.path.isfile(out):
        raise OptionError(f"--out must be a folder, but {out} is a file.")
    found = [name for name in RUN_FILES if os.path.exists(out / name)]
    if found:
        raise OptionError(f"--out {out} holds another run ({', '.join(found)}). Pass a new folder.")
    problem = problem_with_output(out)
    if problem is not None:
        raise OptionError(f"--out {out} cannot be created: {problem}.")


def _is_a(value: Any, kind: Any) -> bool:
    return kind is not None and isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
