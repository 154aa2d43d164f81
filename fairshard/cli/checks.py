"""Checks of the options of ``fairshard train`` against ranks, host and files, before any rank starts."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from fairshard.cli.local_path import problem_with_output
from fairshard.cli.machine import RANK_NBYTES, Sizes, least_nbytes, shortage
from fairshard.cli.option_error import OptionError
from fairshard.cli.options import RUN_FILES, TrainOptions
from fairshard.cli.text import TextError, TextPlan, plan_text
from fairshard.cli.tokens import check_tokens, plan_tokens
from fairshard.utils.device import device_count


def check_options(options: TrainOptions, world_size: int, local_size: int) -> TextPlan:
    """Check the options against the ranks, the host and its files; all ranks of a host get the same answer.

    Called before any rank starts; under torchrun, on every rank before the process group is created.

    Returns: the plan of the text, which the checks build anyway.

    Raises:
        OptionError: the first problem found.
    """
    _check_packages(options)
    _check_device(options, local_size)
    _check_batch(options, world_size)
    if options.out is not None and not options.resume:
        _check_out(options.out)
    try:
        if options.tokens is None:
            plan = plan_text(options.data, options.seed, options.context)
        else:
            plan = plan_tokens(options.tokens, options.token_dtype, options.seed, options.context)
    except TextError as error:
        raise OptionError(str(error)) from error
    if options.hf is None and options.factory is None:
        check_tokens(plan, options.vocab_size, "Pass a larger --vocab-size.")
        _check_memory(options, plan, world_size, local_size)
    else:
        _check_other_model(options, plan, local_size)
    return plan


def _check_packages(options: TrainOptions) -> None:
    missing = [name for name in ("matplotlib", "tqdm") if importlib.util.find_spec(name) is None]
    if missing:
        raise OptionError(f"{' and '.join(missing)} must be installed. Run: pip install 'fairshard[cli]'")
    if options.log is not None and importlib.util.find_spec(options.log) is None:
        raise OptionError(f"--log {options.log} needs a package that is not installed. Run: pip install {options.log}")


def _check_other_model(options: TrainOptions, plan: TextPlan, local_size: int) -> None:
    """Check the model of ``--hf`` or ``--factory``, and that this machine can build it on every rank."""
    from fairshard.cli.task import planned_nbytes  # here because it may import transformers

    problem = shortage(local_size * (planned_nbytes(options, plan) + RANK_NBYTES))
    if problem is not None:
        raise OptionError(f"{local_size} ranks that build this model need {problem}. Pass a smaller --nproc or model.")


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


def _check_memory(options: TrainOptions, plan: TextPlan, world_size: int, local_size: int) -> None:
    """Raise if this machine cannot hold what the ranks take at least."""
    is_mapped = not plan.is_text or len(plan.train) == len(plan.validation) == 1
    text_nbytes = 0 if is_mapped else plan.train_nbytes + plan.validation_nbytes
    batch_size = options.batch_size // (world_size * options.accumulate)
    on_cpu = options.device_type == "cpu"
    sizes = Sizes(options.layers, options.dim, options.context, options.vocab_size, batch_size, on_cpu)
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


def check_new(path: Path, option: str = "") -> None:
    """Require that ``path``, named after ``option`` in messages, can be made and is not there yet.

    Raises:
        OptionError: it exists, or cannot be created.
    """
    if os.path.lexists(path):
        raise OptionError(f"{option}{path} exists, and is never overwritten. Pass a new name, or remove it.")
    if not os.path.isdir(path.parent):
        raise OptionError(f"The parent of {option}{path} must be a folder, but is not one. Create it.")
    problem = problem_with_output(path)
    if problem is not None:
        raise OptionError(f"{option}{path} cannot be created: {problem}.")
