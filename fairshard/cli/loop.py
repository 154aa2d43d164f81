"""The training loop of ``fairshard train``, also for a script of your own.

Start the script with ``torchrun --nproc-per-node 2 script.py``, or as it is for one rank::

    from fairshard.cli.loop import TrainOptions, train

    def show(metrics):  # on every rank, after every step
        print(metrics.step, metrics.loss)

    folder = train(TrainOptions(steps=20, layers=2), on_step=show)
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from fairshard.checkpoint import Checkpointer, on_preemption
from fairshard.cli.data import Data, DataPlan, check_tokens, plan_data, read_data
from fairshard.cli.log import RunLog, StepMetrics
from fairshard.cli.model import Task, build_model, logits_of, planned_task
from fairshard.cli.options import OptionError, TrainingStopped, TrainOptions, printable, refused
from fairshard.cli.ranks import Ranks, default_threads
from fairshard.cli.runs import (
    CHECKPOINTS,
    CONFIG,
    check_new,
    chosen_options,
    make_run_folder,
    read_config,
    write_config,
)
from fairshard.cli.trainer import Trainer
from fairshard.extras.observe.timeline import timeline
from fairshard.planning.summary import unit_lines, unit_table
from fairshard.utils.collectives import gather_objects
from fairshard.utils.device import device_count, peak_memory, set_device
from fairshard.utils.groups import host_group
from fairshard.utils.messages import gather_scalars
from fairshard.version import __version__

__all__ = ["OnStep", "StepMetrics", "TrainOptions", "train"]

OnStep = Callable[[StepMetrics], None]
"""Called on every rank after every step."""

_PROMPT = 32
_TEMPERATURE = 0.8


def train(options: TrainOptions, on_step: OnStep | None = None) -> Path:
    """Train as ``fairshard train`` does, in this process, as one rank; returns the folder of the run. **Collective.**

    The ranks are those of the default process group; without one, those that torchrun has started, or this process
    alone, and the group is destroyed at the end. Called on the main thread. ``on_step`` is called with the line of
    ``metrics.jsonl``; an exception in it ends the run. If ``options.out`` has this run already, it goes on.

    Raises:
        OptionError: the options are invalid; nothing has started.
        TrainingStopped: the loss or the gradients are not finite, or the run cannot go on for another reason.
        Preempted: a signal asked for it, and the step is saved.
    """
    has_group = dist.is_initialized()
    options = chosen_options(options.given())
    plan = check_options(options, Ranks.here())
    try:
        return train_here(options, plan, on_step)
    finally:
        if not has_group and dist.is_initialized():
            dist.destroy_process_group()


def check_options(options: TrainOptions, ranks: Ranks) -> DataPlan:
    """Check the options against the ranks, the host and its files; all ranks of a host get the same answer.

    Called before any rank starts; under torchrun, on every rank before the process group is created.

    Raises:
        OptionError: the first problem found.
    """
    for name in filter(None, ("matplotlib", "tqdm", options.log)):
        if importlib.util.find_spec(name) is None:
            what = options.log if name == options.log else "'fairshard[cli]'"
            raise OptionError(f"{name} must be installed. Run: pip install {what}")
    kind, share = options.device_type, ranks.size * options.accumulate
    if options.batch_size < share:
        raise OptionError(
            f"--batch-size {options.batch_size} cannot feed {ranks.size} ranks in --accumulate {options.accumulate} "
            f"passes: it must be at least {share}."
        )
    if kind != "cpu" and ranks.local_size > device_count(kind):
        raise OptionError(
            f"each rank needs its own accelerator, but there are {ranks.local_size} ranks and {device_count(kind)} of "
            f"type {kind} here. Pass a smaller --nproc, or --device cpu."
        )
    if options.out is not None:
        with refused("--out cannot be created: ", OSError):
            check_new(options.out)
            made = next(path for path in (options.out, *options.out.absolute().parents) if path.exists())
            if not (made.is_dir() and os.access(made, os.W_OK | os.X_OK)):
                raise NotADirectoryError(f"{made} is not a writable folder")
    plan = plan_data(options)
    task = planned_task(options, may_fail=True)
    if _tokenizer(options, plan, None if task is None else task.vocab_size) is None and task is not None:
        check_tokens(plan, task.vocab_size or sys.maxsize)
    return plan


def train_here(options: TrainOptions, plan: DataPlan, on_step: OnStep | None = None) -> Path:
    """Train all steps, validate, save; returns the folder of the run. **Collective.**

    Creates the process group if there is none, and leaves it.
    """
    ranks = Ranks.here()
    with contextlib.ExitStack() as stack:
        preemption = stack.enter_context(on_preemption(None, signals=options.stop_signals, grace=options.grace))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("error", "All ranks should begin with the same weights")
        device = join(options, ranks)
        task = build_model(options, device)
        own = make_run_folder(options.out) if ranks.rank == 0 else None
        began = read_config(own) if own is not None and (own / CONFIG).exists() else None
        found: tuple[Path, dict[str, Any] | None] = gather_objects((own, began), host_group())[0]
        folder, began = found
        every = options.save_every or sys.maxsize
        checkpointer = Checkpointer(folder / CHECKPOINTS, every=every, keep_last=options.keep_last)
        checkpointer.preemption = preemption
        checkpointer.lock()
        tokenizer = _tokenizer(options, plan)
        data = read_data(plan, folder, ranks.rank, options.context, tokenizer)
        entry = gather_objects(data.entry() if ranks.rank == 0 else {}, host_group())[0]
        if began is not None and began.get("data", entry) != entry:
            raise TrainingStopped(
                f"the run in {folder} began with other data: {began['data']}, but has {entry}. Restore them."
            )
        trainer = Trainer(task, data, options, ranks, device)
        done = _load(checkpointer, trainer, options) if began is not None else 0
        log = None
        if ranks.rank == 0:
            log = _begin(options, ranks, plan, (task, data), folder, done)
            stack.callback(log.close)
        for step in range(done + 1 if done else 0, options.steps + 1):
            if step:
                title = f"fairshard train, {folder.name}, step {step}"
                paths = folder / "trace.json", folder / "trace.png"
                is_traced = step == options.trace
                with timeline(task.model, *paths, title=title) if is_traced else contextlib.nullcontext():
                    metrics = trainer.step(step)
                if log:
                    log.step(metrics)
                if on_step is not None:
                    on_step(metrics)
            if step % options.eval_every == 0 or step == options.steps:
                val_loss = trainer.validate(step)
                if log:
                    log.validation(step, val_loss)
            is_saved = step > 0 and checkpointer.maybe_save(step, *trainer.saved())
            if step == options.steps and options.save_every and not is_saved:
                checkpointer.save(step, *trainer.saved())
                is_saved = True
            if log and is_saved:
                log.saving(step)
        checkpointer.close()
        peaks = tuple(int(peak) for (peak,) in gather_scalars([peak_memory(device)], device=device))
        written = sample(task, data, options, tokenizer, device) if options.sample else None
        if log:
            log.finish(peaks)
            if written is not None:
                log.say(written)
    return folder


def join(options: TrainOptions, ranks: Ranks) -> torch.device:
    """Set threads and device, and create the process group if there is none. **Collective.**"""
    is_cpu = options.device_type == "cpu"
    device = torch.device("cpu") if is_cpu else torch.device(options.device_type, ranks.local_rank)
    if dist.is_initialized():
        return device
    torch.set_num_threads(options.threads or default_threads(ranks.local_size))
    how: dict[str, Any] = {} if options.timeout_s is None else {"timeout": timedelta(seconds=options.timeout_s)}
    if Ranks.from_environment() is None:
        how |= {"store": HashStore(), "rank": 0, "world_size": 1}
    if not is_cpu:
        set_device(device)
        # torch asks every later group for its backend of `device_id`, and a gloo group has one for these types only.
        how["device_id"] = device if device.type in dist.Backend.backend_capability["gloo"] else None
    dist.init_process_group(dist.get_default_backend_for_device(device), **how)
    return device


def _tokenizer(options: TrainOptions, plan: DataPlan, vocab_size: int | None = None) -> Any | None:
    """The tokenizer that makes tokens of a text; None if they are bytes, or ready."""
    if options.hf is None or not plan.is_text:
        return None
    from fairshard.cli import hugging_face

    return hugging_face.tokenizer_beside(options.hf, vocab_size)


def _load(checkpointer: Checkpointer, trainer: Trainer, options: TrainOptions) -> int:
    """Load the checkpoint to go on from; returns its step, or 0 without any."""
    if options.resume_from is not None:
        return checkpointer.load_step(options.resume_from, *trainer.saved())
    return checkpointer.load_latest(*trainer.saved()) or 0


def _begin(
    options: TrainOptions, ranks: Ranks, plan: DataPlan, built: tuple[Task, Data], folder: Path, done: int
) -> RunLog:
    """Print the setup of a run that goes on after step ``done``, and open its files; on rank 0 only."""
    task, data = built
    rows = unit_table(task.model)
    if options.hf is not None:
        from fairshard.cli import hugging_face

        hugging_face.save_beside(folder / hugging_face.SAVED, options.hf, task.model, options.context)
    numel, entry = sum(row.numel for row in rows), data.entry()
    name = f"{task.name}, context {options.context}"
    config = {
        "options": asdict(options),
        "world_size": ranks.size,
        "device": options.device_type,
        "backend": dist.get_backend(),
        "threads": torch.get_num_threads(),
        "model": name,
        "parameters": numel,
        "source": plan.source,
        "data": entry,
    }
    log = RunLog(folder, config, done, data.bytes_per_token, task.has_own_loss)
    write_config(folder, config)  # after the lines of an earlier end are dropped
    random = ", ".join(task.random[:3])
    lines = [
        f"fairshard {__version__}: world size {ranks.size} on {options.device_type} over {config['backend']}, "
        f"{config['threads']} threads each",
        f"data   {plan.source}: {entry['train_tokens']:,} tokens to train on, "
        f"{entry['validation_tokens']:,} to validate on",
        f"model  {name}: {numel:,} parameters, computing in {options.precision} through {options.engine}",
        random and f"warning: {options.hf} lacks {len(task.random)} weights, which start at random: {random} ...",
        f"run    {folder}" + (f", resumed after step {done}" if done else ""),
        *unit_lines(rows),
    ]
    for line in filter(None, lines):
        log.say(line)
    return log


@torch.no_grad()
def sample(task: Task, data: Data, options: TrainOptions, tokenizer: Any | None, device: torch.device) -> str:
    """The start of the validation text, and how the model goes on, drawn at temperature 0.8. **Collective.**

    Every rank draws for itself; they call the model equally often. Models whose output is not logits are not asked.
    """
    length = min(_PROMPT, options.context)
    tokens = torch.from_numpy(data.validation[np.arange(length)]).to(device).unsqueeze(0)
    random = torch.Generator(device).manual_seed(options.seed)
    task.model.eval()
    for _ in range(options.sample):
        seen = tokens[:, -options.context :]
        logits = logits_of(task.model, seen)
        if not isinstance(logits, Tensor) or logits.shape[:2] != seen.shape or logits.dim() != 3:
            return "sample           none: the model's output is not logits [rows, length, vocabulary]"
        weights = torch.softmax(logits[:, -1].float() / _TEMPERATURE, -1)
        tokens = torch.cat([tokens, torch.multinomial(weights, 1, generator=random)], 1)
    task.model.train()

    def text_of(ids: Sequence[int]) -> str:
        if tokenizer is not None:
            return str(tokenizer.decode(ids))
        if data.bytes_per_token is None:
            return " ".join(map(str, ids))
        return bytes(token % 256 for token in ids).decode("utf-8", errors="replace")

    prompt, written = (text_of(part) for part in (tokens[0, :length].tolist(), tokens[0, length:].tolist()))
    lines = ["sample           the text before | is given, the rest is the model's"]
    return "\n".join([*lines, *(f"  {printable(line)}" for line in f"{prompt}|{written}".split("\n"))])
