"""The training loop of ``fairshard train``, also for a script of your own.

Start the script with ``torchrun --nproc-per-node 2 script.py``, or as it is for one rank::

    from fairshard.cli.loop import TrainOptions, train

    def show(metrics):  # on every rank, after every step
        print(metrics.step, metrics.loss)

    folder = train(TrainOptions(steps=20, layers=2), on_step=show)
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from fairshard.checkpoint import Checkpointer, Preempted, Preemption, on_preemption
from fairshard.cli.checks import check_options
from fairshard.cli.encode import FOLDER as TOKENS
from fairshard.cli.encode import encoded
from fairshard.cli.meeting import meeting
from fairshard.cli.metrics import StepMetrics, make_run_folder
from fairshard.cli.options import TrainOptions
from fairshard.cli.progress import say
from fairshard.cli.ranks import Ranks, default_threads
from fairshard.cli.resume import CHECKPOINTS, check_text, elastic_job, text_entry, write_steps
from fairshard.cli.run_log import RunLog
from fairshard.cli.sample import sample
from fairshard.cli.sharded import Sharded, TrainingStopped, build_model
from fairshard.cli.text import Text, TextPlan, load
from fairshard.cli.trace import traced
from fairshard.cli.trackers import tracker
from fairshard.cli.trainer import Trainer
from fairshard.errors import CheckpointError
from fairshard.planning.summary import UnitRow, unit_lines, unit_table
from fairshard.utils.collectives import gather_objects
from fairshard.utils.device import peak_memory, set_device
from fairshard.utils.groups import host_group
from fairshard.utils.host import visible_cpus
from fairshard.utils.messages import gather_scalars
from fairshard.utils.size_text import size_text
from fairshard.version import __version__

__all__ = ["OnStep", "StepMetrics", "TrainOptions", "train"]

OnStep = Callable[[StepMetrics], None]
"""Called on every rank after every step."""


def train(options: TrainOptions, on_step: OnStep | None = None) -> Path:
    """Train as ``fairshard train`` does, in this process, as one rank; returns the folder of the run. **Collective.**

    The ranks are those of the default process group; without one, those that torchrun has started, or this process
    alone, and the group is destroyed at the end. Called on the main thread. ``on_step`` is called with the line of
    ``metrics.jsonl``; an exception in it ends the run.

    Raises:
        OptionError: the options are invalid; nothing has started.
        TrainingStopped: the loss or the gradients are not finite, or the run cannot go on for another reason.
        Preempted: a signal asked for it, and the step is saved.
    """
    has_group = dist.is_initialized()
    ranks = Ranks.from_environment()
    if ranks is None:
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), 0, 1) if has_group else Ranks(0, 1, 0, 1)
    plan = check_options(options, ranks.size, ranks.local_size)
    check_text(options, plan)
    if has_group:
        kind = options.device_type
        device = torch.device("cpu") if kind == "cpu" else torch.device(kind, ranks.local_rank)
    else:
        device = join(options, ranks)
    preemption = on_preemption(None, signals=options.stop_signals, grace=options.grace)
    try:
        return train_steps(options, ranks, plan, device, preemption, on_step)
    finally:
        preemption.close()
        if not has_group:
            dist.destroy_process_group()


def join(options: TrainOptions, ranks: Ranks) -> torch.device:
    """Set threads and device, and create the process group. **Collective.**"""
    torch.set_num_threads(options.threads or default_threads(ranks.local_size))
    alone: dict[str, Any] = {}
    if Ranks.from_environment() is None:
        alone = {"store": HashStore(), "rank": 0, "world_size": 1}
    if options.device_type == "cpu":
        dist.init_process_group("gloo", **meeting(options.timeout_s), **alone)
        return torch.device("cpu")
    device = torch.device(options.device_type, ranks.local_rank)
    set_device(device)
    # torch asks every later group for its backend of `device_id`, and a gloo group has one for these types only.
    bound = device if device.type in dist.Backend.backend_capability["gloo"] else None
    met = {**meeting(options.timeout_s), **alone}
    dist.init_process_group(dist.get_default_backend_for_device(device), device_id=bound, **met)
    return device


def train_steps(
    options: TrainOptions,
    ranks: Ranks,
    plan: TextPlan,
    device: torch.device,
    preemption: Preemption,
    on_step: OnStep | None = None,
) -> Path:
    """Build the model, train all steps, validate, save; returns the folder of the run. **Collective.**"""
    sharded = build_model(options, device)
    own = make_run_folder(options.out) if ranks.rank == 0 else None
    folder: Path = gather_objects(own, host_group())[0]
    checkpointer = Checkpointer(
        folder / CHECKPOINTS,
        every=max(1, options.save_every),
        keep_last=options.keep_last,
    )
    try:
        checkpointer.lock()
    except CheckpointError as error:
        raise TrainingStopped(str(error)) from error
    decode, text = _text(options, ranks, plan, folder, sharded)
    trainer = Trainer(sharded, text, options, ranks, device)
    rows = unit_table(sharded.model)
    done = trainer.load(checkpointer, options.resume_from) if options.resume else 0
    saved = done
    began = _begin(options, ranks, plan, (sharded, text, rows), folder, done) if ranks.rank == 0 else None
    with began or contextlib.nullcontext() as log:
        for step in range(done + 1 if done else 0, options.steps + 1):
            if step > 0:
                is_traced = step == options.trace
                with traced(sharded.model, folder, step) if is_traced else contextlib.nullcontext():
                    metrics = trainer.step(step)
                if log:
                    log.step(metrics)
                if on_step is not None:
                    on_step(metrics)
            if step % options.eval_every == 0 or step == options.steps:
                val_loss = trainer.validate(step)
                if log:
                    log.validation(step, val_loss)
            if step and options.save_every and (step % options.save_every == 0 or step == options.steps):
                trainer.save(checkpointer, step)
                saved = step
                if log:
                    log.saving(step)
            if step and preemption.is_due() and step < options.steps:
                if saved < step:
                    trainer.save(checkpointer, step)
                checkpointer.close()
                if ranks.rank == 0:
                    _say_stopped(preemption, step, folder)
                raise Preempted(step)
        checkpointer.close()
        peaks = tuple(int(peak) for (peak,) in gather_scalars([peak_memory(device)], device=device))
        written = sample(sharded, text, options, decode, device) if options.sample else None
        if log:
            log.finish(peaks, trainer.places, trainer.copy_wait_s)
            if written is not None:
                say(written)
    return folder


def _text(
    options: TrainOptions, ranks: Ranks, plan: TextPlan, folder: Path, sharded: Sharded
) -> tuple[Callable[[Sequence[int]], str], Text]:
    """How to read tokens, and the text: bytes, tokens of ``--tokens``, or text as the tokenizer of ``--hf`` cuts it.

    For ``--hf``, rank 0 also keeps the config and the tokenizer in the run's folder.
    """
    tokenizer = None
    if options.hf is not None:
        from fairshard.cli import hugging_face

        tokenizer = hugging_face.tokenizer_beside(options.hf)
        if ranks.rank == 0 and not (folder / hugging_face.SAVED).exists():
            hugging_face.save_beside(folder / hugging_face.SAVED, options.hf, sharded.task.model, options.context)
    if tokenizer is not None:
        text = encoded(plan, tokenizer, folder / TOKENS, ranks.rank, options.context) if plan.is_text else load(plan)
        return tokenizer.decode, text
    if plan.is_text:
        return lambda ids: bytes(token % 256 for token in ids).decode("utf-8", errors="replace"), load(plan)
    return lambda ids: " ".join(map(str, ids)), load(plan)


def _begin(
    options: TrainOptions,
    ranks: Ranks,
    plan: TextPlan,
    built: tuple[Sharded, Text, Sequence[UnitRow]],
    folder: Path,
    done: int,
) -> RunLog:
    """Print the setup of a run that starts after step ``done``, and open its files; on rank 0 only."""
    sharded, text, rows = built
    threads = torch.get_num_threads()
    backend = dist.get_backend()
    numel = sum(row.numel for row in rows)
    sizes = f"{size_text(plan.train_nbytes)} to train on, {size_text(plan.validation_nbytes)} to validate on"
    if text.bytes_per_token != 1:
        sizes += f"; {len(text.train):,} and {len(text.validation):,} tokens"
    say(
        f"fairshard {__version__}: {_count(ranks.size, 'rank')} on {options.device_type} over {backend}, "
        f"{_count(threads, 'thread')} each ({_count(visible_cpus(), 'CPU')} visible)"
    )
    say(f"text   {plan.source}: {sizes}")
    name = f"{sharded.task.name}, context {options.context}"
    say(f"model  {name}: {numel:,} parameters, computing in {options.precision} through {options.engine}")
    if sharded.task.random:
        names = ", ".join(sharded.task.random[:3]) + (" ..." if len(sharded.task.random) > 3 else "")
        say(f"warning: {options.hf} lacks {len(sharded.task.random)} weights, which start at random: {names}")
    say(f"run    {folder}" + (f", resumed after step {done}" if options.resume else ""))
    for line in unit_lines(rows):
        say(line)
    config: dict[str, Any] = {
        "options": asdict(options),
        "world_size": ranks.size,
        "device": options.device_type,
        "backend": backend,
        "threads": threads,
        "model": name,
        "parameters": numel,
        "text": text_entry(plan),
        "elastic_job": elastic_job(),
    }
    if options.resume:
        write_steps(replace(options, out=folder))
    follower = None if options.log is None else tracker(options.log, folder, config, done)
    kept = done if options.resume else None
    return RunLog(folder, config, kept, text.bytes_per_token, follower, sharded.task.has_own_loss)


def _say_stopped(preemption: Preemption, step: int, folder: Path) -> None:
    cause = "a signal to another rank" if preemption.number is None else preemption.number.name
    text = f"stopped by {cause} after step {step}, which is saved. To continue: --resume --out {folder}"
    print(f"fairshard train: {text}", file=sys.stderr, flush=True)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
