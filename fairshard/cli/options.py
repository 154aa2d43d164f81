"""The options of ``fairshard train``: one frozen dataclass, and every check on them. flags.py has the flags."""

from __future__ import annotations

import math
import signal as signals
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from fairshard.cli.gpt import NUM_BYTES
from fairshard.cli.machine import max_processes
from fairshard.cli.option_error import OptionError
from fairshard.cli.tokens import TOKEN_DTYPES
from fairshard.cli.wrapping import check_policy
from fairshard.utils.device import check_device_type, default_device_type, device_count
from fairshard.utils.host import visible_cpus

PRECISIONS = ("fp32", "bf16", "fp16")
COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # for mixed precision; fp32 does not need it
OPTIMIZERS = ("cpu-adamw", "adamw", "sgd")
SIGNALS = ("USR1", "USR2", "HUP")
PICTURE = "run.png"
RUN_FILES = ("config.json", "metrics.jsonl", PICTURE)
ENGINES = ("wrapper", "fully_shard")
TRACKERS = ("tensorboard", "wandb", "trackio")

GPT_FLAGS = ("layers", "dim", "heads", "vocab_size")
"""Options that describe the GPT, and no other model."""

_CHOICES = {
    "engine": ENGINES,
    "precision": PRECISIONS,
    "optimizer": OPTIMIZERS,
    "signal": SIGNALS,
    "token_dtype": TOKEN_DTYPES,
    "log": TRACKERS,
}
_MAX_S = 1_000_000
_CPU_TIMEOUT_S = 120.0
_AT_LEAST_ONE = (
    "nproc", "steps", "batch_size", "accumulate", "context", "layers", "dim", "heads", "eval_every", "threads",
    "keep_last", "resume_from", "trace", "lr_steps", "vocab_size",
)  # fmt: skip
# Far more than anyone uses, and small enough that nothing overflows or takes hours to refuse.
_AT_MOST: dict[str, float] = {
    **dict.fromkeys(("steps", "lr_steps", "eval_every", "save_every", "keep_last", "warmup", "trace"), 10**9),
    **dict.fromkeys(("batch_size", "accumulate", "context", "dim", "heads", "vocab_size"), 10**7),
    "resume_from": 10**9,
    "sample": 10**6,
    **{"layers": 10_000, "max_restarts": 10_000, "bucket_cap_mb": 10**6, "lr": 1e38, "weight_decay": 10**6},
}
_AT_LEAST_ZERO = (
    "warmup", "seed", "weight_decay", "clip", "bucket_cap_mb", "save_every",
    "max_restarts", "sample",
)  # fmt: skip


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
    tokens: tuple[Path, ...] | None = None
    token_dtype: str | None = None
    hf: Path | None = None
    factory: str | None = None
    out: Path | None = None
    seed: int = 0
    layers: int = 4
    dim: int = 128
    heads: int = 4
    context: int = 64
    vocab_size: int = NUM_BYTES
    steps: int = 450
    batch_size: int = 32
    accumulate: int = 1
    lr: float = 4e-3
    weight_decay: float = 0.1
    warmup: int | None = None
    clip: float = 1.0
    eval_every: int = 100
    engine: str = "wrapper"
    policy: str = "blocks"
    precision: str = "fp32"
    bucket_cap_mb: float = 25.0
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    move_grads_to_cpu: bool | None = None
    optimizer: str = "adamw"
    save_every: int = 50
    keep_last: int = 3
    resume: bool = False
    resume_from: int | None = None
    max_restarts: int = 0
    trace: int | None = None
    log: str | None = None
    sample: int = 0
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
        if self.trace is not None and self.trace > self.steps:
            raise OptionError(f"--trace must be at most --steps = {self.steps}, but is {self.trace}.")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in (*choices, getattr(TrainOptions, name)):
                flag = name.replace("_", "-")
                raise OptionError(f"--{flag} must be one of {', '.join(choices)}, but is {getattr(self, name)}.")
        _check_device_type(self.device)
        self._check_model()
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
            is_paths = isinstance(value, tuple) and value and all(isinstance(path, Path) for path in value)
            is_right = is_paths if names[0] == "tuple[Path, ...]" else any(_is_a(value, allowed.get(n)) for n in names)
            if not is_none and not is_right:
                raise OptionError(f"--{field.name.replace('_', '-')} must be of the type {kinds}, but is {value!r}.")

    def _check_model(self) -> None:
        """Check options that say two things about the model or its data."""
        for one, other in (("hf", "factory"), ("data", "tokens")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise OptionError(f"--{one} and --{other} cannot be combined. Leave one of them out.")
        if self.token_dtype is not None and self.tokens is None:
            raise OptionError("--token-dtype is that of --tokens, but there are none. Leave it out.")
        for name in GPT_FLAGS if self.hf is not None or self.factory is not None else ():
            if getattr(self, name) != getattr(TrainOptions, name):
                flag = name.replace("_", "-")
                raise OptionError(f"--{flag} describes the GPT, but the model is another one. Leave it out.")
        if self.engine == "fully_shard" and self.move_grads_to_cpu not in (None, self.cpu_offload):
            raise OptionError(
                "--engine fully_shard keeps gradients where it keeps the shards. Leave --move-grads-to-cpu out, or "
                "pass --engine wrapper."
            )
        check_policy("--policy", self.policy)

    def _check_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is not None and not (math.isfinite(value) and value >= least):
            raise OptionError(f"--{name.replace('_', '-')} must be at least {least}, but is {value}.")


def _check_device_type(device: str) -> None:
    if device == "auto":
        return
    try:
        check_device_type("--device", device)
    except ValueError as error:
        raise OptionError(str(error)) from error


def _is_a(value: Any, kind: Any) -> bool:
    return kind is not None and isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
