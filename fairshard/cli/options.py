"""The options of ``fairshard train``: each field is a flag, with its help, its limits, and its entry in a JSON file."""

# ruff: noqa: RUF009 -- `_option` makes fields

from __future__ import annotations

import argparse
import contextlib
import math
import signal as signals
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

import torch

from fairshard.errors import FairshardError
from fairshard.utils.device import check_device_type, default_device_type, device_count

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # for mixed precision; fp32 does not need it
POLICIES = "blocks: repeated modules; class:NAME[,NAME]: those classes; size:N: at least N parameters; none: one unit"

_GPT_FLAGS = ("layers", "dim", "heads", "vocab_size")
_LEAST_POSITIVE = 1e-30
_CPU_TIMEOUT_S = 120.0
_MAX_LINE = 1000


class OptionError(ValueError):
    """Invalid options; the message is one line for the user."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class TrainingStopped(FairshardError):
    """Training cannot continue; raised on all ranks at the same step, with the same message."""


@contextlib.contextmanager
def refused(
    prefix: str, *kinds: type[BaseException], becomes: type[OptionError | TrainingStopped] = OptionError
) -> Iterator[None]:
    """Turn errors of ``kinds`` into `OptionError`, or ``becomes``: what the user gave has caused them."""
    try:
        yield
    except kinds as error:
        raise becomes(f"{prefix}{error}") from error


def one_line(text: str) -> str:
    """``text`` in one printable line of at most 1,000 characters: it may quote names of any kind."""
    shown = printable(" ".join(text.split()))
    return shown if len(shown) <= _MAX_LINE else f"{shown[: _MAX_LINE // 2]} ... {shown[-_MAX_LINE // 2 :]}"


def printable(text: str) -> str:
    """``text`` with escapes instead of control characters, which could move a terminal's cursor or worse."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


class OneLineParser(argparse.ArgumentParser):
    """``ArgumentParser`` that raises `OptionError` instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise `OptionError` with argparse's message."""
        raise OptionError(f"{message}. See {self.prog} --help.")


def local_path(text: str) -> Path:
    """Type of an argument that is a path on this machine.

    Raises:
        ArgumentTypeError: it cannot be one.
    """
    if not text or "\0" in text or "://" in text:
        raise argparse.ArgumentTypeError(f"a path must name a file or folder on this machine, but is {text!r}")
    return Path(text)


def _option(
    group: str, default: Any, text: str, kind: Any = None, least: float = 0, most: float = 1e9, **more: Any
) -> Any:
    """A field with the flag of its name: ``kind`` is the type of its value, ``more`` goes to ``add_argument``."""
    limits = {"kind": kind or type(default), "least": least, "most": most}
    return field(default=default, metadata={"group": group, "help": text, "more": more, **limits})


@dataclass(frozen=True)
class TrainOptions:
    """Options of a run; each field is the flag of the same name.

    Raises:
        OptionError: a value is invalid for any number of ranks.
    """

    nproc: int | None = _option(
        "ranks", None, "ranks to launch on this machine (default: one per accelerator, or 2)", int, 1, 1000, metavar="N"
    )
    device: str = _option("ranks", "auto", "cpu, cuda, xpu, ...; auto: the accelerator if there is one", metavar="TYPE")
    threads: int | None = _option(
        "ranks", None, "CPU threads of each rank (default: visible CPUs / ranks here)", int, 1, 1000, metavar="N"
    )
    timeout: float | None = _option(
        "ranks", None, "seconds that a rank waits for the others (default: 120 on the CPU)", float, 1e-3, 1e6,
        metavar="S",
    )  # fmt: skip
    data: Path | None = _option(
        "files", None, "file or folder of text (default: the standard library's sources)", Path, metavar="PATH"
    )
    tokens: tuple[Path, ...] | None = _option(
        "files", None, "token files instead of text: .bin or .npy", Path, nargs="+", metavar="FILE"
    )
    token_dtype: str | None = _option(
        "files", None, "type of a token in .bin files (default: uint16)", str, choices=("uint16", "uint32")
    )
    out: Path | None = _option(
        "files", None, "folder for the run's files, or of the run to continue (default: runs/<UTC time>)", Path,
        metavar="DIR",
    )  # fmt: skip
    trace: int | None = _option(
        "files", None, "draw the timeline of that step: trace.png, and trace.json for Chrome", int, 1, metavar="STEP"
    )
    log: str | None = _option(
        "files", None, "also log to this package, which must be installed", str,
        choices=("tensorboard", "wandb", "trackio"),
    )  # fmt: skip
    sample: int = _option(
        "files", 0, "print N tokens that the model writes at the end; without N: 300", nargs="?", const=300, metavar="N"
    )
    seed: int = _option("files", 0, "seed of weights, split and batches", most=2**63 - 1, metavar="N")
    save_every: int = _option("checkpoints", 50, "steps between checkpoints, 0 for none", metavar="N")
    keep_last: int = _option("checkpoints", 3, "checkpoints to keep", least=1, metavar="N")
    resume: bool = _option("checkpoints", False, "continue the run in --out, or the newest run, with its own options")
    resume_from: int | None = _option(
        "checkpoints", None, "continue from that checkpoint instead of the newest", int, 1, metavar="STEP"
    )
    max_restarts: int = _option("checkpoints", 0, "times to restart after a failed rank", metavar="N")
    grace: float = _option(
        "checkpoints", 30.0, "seconds to save the step after SIGTERM", least=1e-3, most=1e6, metavar="S"
    )
    signal: str | None = _option(
        "checkpoints", None, "another signal that means the same as SIGTERM", str, choices=("USR1", "USR2", "HUP")
    )
    hf: Path | None = _option(
        "model", None, "causal LM of transformers: a config file, or a folder with its weights", Path, metavar="PATH"
    )
    factory: str | None = _option(
        "model", None, "function that returns a model, or a model and its loss", str, metavar="PKG.MOD:FN"
    )
    layers: int = _option("model", 4, "transformer blocks of the GPT", least=1, most=10_000, metavar="N")
    dim: int = _option("model", 128, "width of the GPT", least=1, metavar="N")
    heads: int = _option("model", 4, "attention heads of the GPT", least=1, metavar="N")
    context: int = _option("model", 64, "tokens in a sequence, for any model", least=1, metavar="N")
    vocab_size: int = _option("model", 256, "number of tokens of the GPT; 256 are all bytes", least=1, metavar="N")
    steps: int = _option("training", 450, "optimizer steps; of a run that goes on, more of them", least=1, metavar="N")
    batch_size: int = _option("training", 32, "sequences per step, over all ranks", least=1, metavar="N")
    accumulate: int = _option("training", 1, "passes per step, each with a part of its batch", least=1, metavar="N")
    lr: float = _option("training", 4e-3, "peak learning rate", least=_LEAST_POSITIVE, most=1e38, metavar="X")
    weight_decay: float = _option("training", 0.1, "weight decay of the optimizer", metavar="X")
    warmup: int | None = _option(
        "training", None, "steps up to the peak, then a cosine (default: --lr-steps / 10, at least 20)", int,
        metavar="N",
    )  # fmt: skip
    lr_steps: int | None = _option(
        "training", None, "steps after which the learning rate stays (default: --steps)", int, 1, metavar="N"
    )
    clip: float = _option("training", 1.0, "largest gradient norm, 0 for no clipping", metavar="X")
    eval_every: int = _option("training", 100, "steps between validations", least=1, metavar="N")
    engine: str = _option("engine", "wrapper", "which entry point shards the model", choices=("wrapper", "fully_shard"))
    policy: str = _option("engine", "blocks", f"the units: {POLICIES}", metavar="POLICY")
    precision: str = _option("engine", "fp32", "compute dtype; weights stay fp32", choices=("fp32", "bf16", "fp16"))
    bucket_cap_mb: float = _option("engine", 25.0, "size of a bucket of gradients, 0 for none", metavar="X")
    reshard_after_forward: bool = _option("engine", True, "free a unit's full weights between forward and backward")
    cpu_offload: bool = _option("offload", False, "keep the weights' shards in host memory")
    move_grads_to_cpu: bool | None = _option(
        "offload", None, "copy reduced gradients to host memory as they arrive (default: as --cpu-offload)", bool
    )
    optimizer: str = _option(
        "offload", "adamw", "cpu-adamw steps during the copies", choices=("cpu-adamw", "adamw", "sgd")
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            _check(each, getattr(self, each.name))
        with refused("", ValueError):
            if self.device != "auto":
                check_device_type("--device", self.device)
        check_policy(self.policy)
        other_model = self.hf is not None or self.factory is not None
        gpt_flags = [flag(name) for name in _GPT_FLAGS if getattr(self, name) != getattr(TrainOptions, name)]
        restarts = self.max_restarts and self.resume_from is not None
        has_no_place = self.cpu_offload and self.move_grads_to_cpu is False and self.optimizer != "cpu-adamw"
        has_other_place = self.engine == "fully_shard" and self.move_grads_to_cpu not in (None, self.cpu_offload)
        contradictions = {
            "--hf and --factory cannot be combined. Leave one of them out.": self.hf and self.factory,
            "--data and --tokens cannot be combined. Leave one of them out.": self.data and self.tokens,
            "--token-dtype needs --tokens, but there are none. Leave it out.": self.token_dtype and not self.tokens,
            f"{' '.join(gpt_flags)} describes the GPT, but the model is another one. Leave it out.":
                other_model and gpt_flags,
            f"--dim must be a multiple of --heads = {self.heads}, but is {self.dim}.": self.dim % self.heads,
            f"--warmup must be at most {self.schedule_steps}, the steps of the schedule, but is {self.warmup}.":
                self.warmup_steps > self.schedule_steps,
            f"--trace must be at most --steps = {self.steps}, but is {self.trace}.": (self.trace or 0) > self.steps,
            "--max-restarts continues from the newest checkpoint, which with --resume-from may belong to the dropped "
            "steps. Leave one of them out.": restarts,
            "--cpu-offload --no-move-grads-to-cpu needs --optimizer cpu-adamw, which fetches the gradients.":
                has_no_place,
            "--engine fully_shard keeps gradients where it keeps the shards. Leave --move-grads-to-cpu out.":
                has_other_place,
        }  # fmt: skip
        for problem, is_there in contradictions.items():
            if is_there:
                raise OptionError(problem)

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

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> TrainOptions:
        """The options with ``values`` as a parser or a JSON file has them; names of other versions are left out."""
        return cls(**{each.name: _typed(each, values[each.name]) for each in fields(cls) if each.name in values})

    def given(self) -> dict[str, Any]:
        """The options that are not the default."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value != getattr(TrainOptions, name)}


def flag(name: str) -> str:
    """The flag of the option ``name``."""
    return f"--{name.replace('_', '-')}"


def add_flags(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add the flags of the options ``names``, or of all; only those that are given are in the parsed arguments."""
    groups: dict[str, Any] = {}
    for each in fields(TrainOptions):
        if names and each.name not in names:
            continue
        meta = each.metadata
        group = groups.get(meta["group"]) or groups.setdefault(meta["group"], parser.add_argument_group(meta["group"]))
        kind = local_path if meta["kind"] is Path else meta["kind"]
        how = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind, **meta["more"]}
        default = "" if each.default is None else f" (default: {each.default})"
        group.add_argument(flag(each.name), default=argparse.SUPPRESS, help=meta["help"] + default, **how)


def check_policy(text: str) -> int:
    """Check the form of ``--policy``; class names are looked up when there is a model.

    Returns: the number of ``size:N``, otherwise 0.

    Raises:
        OptionError: it is in no known form.
    """
    kind, _, value = text.partition(":")
    if kind == "size":
        with contextlib.suppress(ValueError, OverflowError):
            if (size := int(float(value))) >= 1:
                return size
        raise OptionError(f"--policy size:N needs a number of parameters of at least 1, but N is {value!r}.")
    if text not in ("none", "blocks") and not (kind == "class" and value):
        raise OptionError(f"--policy must be size:N, class:NAME, blocks or none, but is {text}.")
    return 0


def _typed(option: Field[Any], value: Any) -> Any:
    """``value`` of an option, which in a JSON file has text for each path."""
    if option.metadata["kind"] is not Path or value is None:
        return value
    return tuple(map(Path, value)) if isinstance(value, (list, tuple)) else Path(value)


def _check(option: Field[Any], value: Any) -> None:
    """Raise if ``value``, perhaps from a file, has another type than the option, or is outside of its limits."""
    meta, name = option.metadata, flag(option.name)
    if value is None and option.default is None:
        return
    kind = (int, float) if meta["kind"] is float else meta["kind"]
    for each in value if meta["more"].get("nargs") == "+" and isinstance(value, tuple) else (value,):
        if not isinstance(each, kind) or (isinstance(each, bool) and kind is not bool):
            raise OptionError(f"{name} must be of the type {meta['kind'].__name__}, but is {each!r}.")
    if isinstance(value, (int, float)) and not (math.isfinite(value) and meta["least"] <= value <= meta["most"]):
        raise OptionError(f"{name} must be at least {meta['least']:g} and at most {meta['most']:g}, but is {value}.")
    choices = meta["more"].get("choices")
    if choices is not None and value not in choices:
        raise OptionError(f"{name} must be one of {', '.join(choices)}, but is {value}.")
