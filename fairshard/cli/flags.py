"""The command line of ``fairshard train``: its flags, with the defaults of `TrainOptions`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from fairshard.cli.local_path import local_path
from fairshard.cli.options import ENGINES, OPTIMIZERS, PRECISIONS, SIGNALS, TRACKERS, TrainOptions
from fairshard.cli.tokens import TOKEN_DTYPES
from fairshard.cli.wrapping import POLICIES

_SAMPLE = 300


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``fairshard train``, with the defaults of ``TrainOptions``."""
    ranks = parser.add_argument_group("ranks")
    _add(ranks, "--nproc", int, "N", "ranks to launch on this machine (default: one per accelerator, or 2)")
    _add(ranks, "--device", str, "TYPE", "cpu, cuda, xpu, ...; auto: the accelerator if there is one (default: auto)")
    _add(ranks, "--threads", int, "N", "CPU threads of each rank (default: visible CPUs / ranks here)")
    _add(ranks, "--timeout", float, "S", "seconds that a rank waits for the others (default: 120 on the CPU)")
    files = parser.add_argument_group("files")
    _add(files, "--data", local_path, "PATH", "file or folder of text (default: the standard library's sources)")
    files.add_argument(
        "--tokens", type=local_path, nargs="+", metavar="FILE", help="token files instead of text: .bin or .npy"
    )
    _add(files, "--token-dtype", str, None, "type of a token in .bin files (default: uint16)", TOKEN_DTYPES)
    _add(files, "--out", local_path, "DIR", "folder for the run's files (default: runs/<UTC time>)")
    _add(files, "--trace", int, "STEP", "draw the timeline of that step: trace.png, and trace.json for Chrome")
    _add(files, "--log", str, None, "also log to this package, which must be installed", TRACKERS)
    files.add_argument(
        "--sample", type=int, nargs="?", const=_SAMPLE, default=TrainOptions.sample, metavar="N",
        help=f"print N tokens that the model writes at the end (default: none; without N: {_SAMPLE})",
    )  # fmt: skip
    _add(files, "--seed", int, "N", "seed of weights, split and batches (default: %(default)s)")
    checkpoints = parser.add_argument_group("checkpoints")
    _add(checkpoints, "--save-every", int, "N", "steps between checkpoints, 0 for none (default: %(default)s)")
    _add(checkpoints, "--keep-last", int, "N", "checkpoints to keep (default: %(default)s)")
    checkpoints.add_argument(
        "--resume", action="store_true", help="continue the run in --out, or the newest run, with its own options"
    )
    _add(checkpoints, "--resume-from", int, "STEP", "continue from that checkpoint instead of the newest")
    _add(checkpoints, "--max-restarts", int, "N", "times to restart after a failed rank (default: %(default)s)")
    _add(checkpoints, "--grace", float, "S", "seconds to save the step after SIGTERM (default: %(default)g)")
    _add(checkpoints, "--signal", str, None, "another signal that means the same as SIGTERM", SIGNALS)
    model = parser.add_argument_group("model", "a GPT of these sizes, unless --hf or --factory name another model")
    _add(model, "--hf", local_path, "PATH", "causal LM of transformers: a config file, or a folder with its weights")
    _add(model, "--factory", str, "PKG.MOD:FN", "function that returns a model, or a model and its loss")
    _add(model, "--layers", int, "N", "transformer blocks (default: %(default)s)")
    _add(model, "--dim", int, "N", "width (default: %(default)s)")
    _add(model, "--heads", int, "N", "attention heads (default: %(default)s)")
    _add(model, "--context", int, "N", "tokens in a sequence, for any model (default: %(default)s)")
    _add(model, "--vocab-size", int, "N", "number of tokens of the GPT (default: %(default)s, all bytes)")
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
    _add(engine, "--engine", str, None, "which entry point shards the model (default: %(default)s)", ENGINES)
    _add(engine, "--policy", str, "POLICY", f"the units: {POLICIES} (default: %(default)s)")
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
    if values["tokens"] is not None:
        values["tokens"] = tuple(values["tokens"])
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
