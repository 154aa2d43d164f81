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

from fairshard.checkpoint import Checkpointer, Preemption, on_preemption
from fairshard.cli.data import Data, DataPlan, check_tokens, plan_data, read_data
from fairshard.cli.log import RunLog, StepMetrics
from fairshard.cli.model import Sharded, build_model, logits_of, planned_task
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
    wanted = {"matplotlib": "'fairshard[cli]'", "tqdm": "'fairshard[cli]'"}
    for name, what in (wanted | ({} if options.log is None else {options.log: options.log})).items():
        if importlib.util.find_spec(name) is None:
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
    with on_preemption(None, signals=options.stop_signals, grace=options.grace) as preemption:
        device = join(options, ranks)
        return _train(options, ranks, plan, device, preemption, on_step)


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


def _train(
    options: TrainOptions,
    ranks: Ranks,
    plan: DataPlan,
    device: torch.device,
    preemption: Preemption,
    on_step: OnStep | None,
) -> Path:
    sharded = build_model(options, device)
    own = make_run_folder(options.out) if ranks.rank == 0 else None
    begun = own is not None and (own / CONFIG).exists()
    found: tuple[Path, bool] = gather_objects((own, begun), host_group())[0]
    folder, begun = found
    checkpointer = Checkpointer(
        folder / CHECKPOINTS, every=options.save_every or sys.maxsize, keep_last=options.keep_last
    )
    checkpointer.preemption = preemption
    checkpointer.lock()
    tokenizer = _tokenizer(options, plan)
    data = read_data(plan, folder, ranks.rank, options.context, tokenizer)
    _check_data(data, folder, ranks.rank)
    trainer = Trainer(sharded, data, options, ranks, device)
    done = _load(checkpointer, trainer, options) if begun else 0
    with contextlib.ExitStack() as stack:
        log = None
        if ranks.rank == 0:
            log = _begin(options, ranks, plan, (sharded, data), folder, done)
            stack.callback(log.close)
        for step in range(done + 1 if done else 0, options.steps + 1):
            if step:
                with _traced(sharded, folder, step) if step == options.trace else contextlib.nullcontext():
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
        written = sample(sharded, data, options, tokenizer, device) if options.sample else None
        if log:
            log.finish(peaks, trainer.places, trainer.copy_wait_s)
            if written is not None:
                log.say(written)
    return folder


def _traced(sharded: Sharded, folder: Path, step: int) -> contextlib.AbstractContextManager[None]:
    """Observe the model in the context, and draw the events of all ranks into ``folder``. **Collective.**"""
    title = f"fairshard train, {folder.name}, step {step}"
    return timeline(sharded.model, folder / "trace.json", folder / "trace.png", title=title)


def _tokenizer(options: TrainOptions, plan: DataPlan, vocab_size: int | None = None) -> Any | None:
    """The tokenizer that makes tokens of a text; None if they are bytes, or ready."""
    if options.hf is None or not plan.is_text:
        return None
    from fairshard.cli import hugging_face

    return hugging_face.tokenizer_beside(options.hf, vocab_size)


def _check_data(data: Data, folder: Path, rank: int) -> None:
    """Raise on all ranks if the run in ``folder`` began with other data. **Collective.**"""
    problem = None
    if rank == 0 and (folder / CONFIG).exists():
        began, found = read_config(folder).get("data"), data.entry()
        if began not in (None, found):
            problem = f"the run in {folder} began with other data: {began}, but has {found}. Restore them."
    problem = gather_objects(problem, host_group())[0]
    if problem is not None:
        raise TrainingStopped(problem)


def _load(checkpointer: Checkpointer, trainer: Trainer, options: TrainOptions) -> int:
    """Load the checkpoint to go on from; returns its step, or 0 without any."""
    if options.resume_from is not None:
        return checkpointer.load_step(options.resume_from, *trainer.saved())
    return checkpointer.load_latest(*trainer.saved()) or 0


def _begin(
    options: TrainOptions, ranks: Ranks, plan: DataPlan, built: tuple[Sharded, Data], folder: Path, done: int
) -> RunLog:
    """Print the setup of a run that goes on after step ``done``, and open its files; on rank 0 only."""
    sharded, data = built
    task, rows = sharded.task, unit_table(sharded.model)
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
    log.say(
        f"fairshard {__version__}: world size {ranks.size} on {options.device_type} over {config['backend']}, "
        f"{config['threads']} threads each"
    )
    sizes = f"{entry['train_tokens']:,} tokens to train on, {entry['validation_tokens']:,} to validate on"
    log.say(f"data   {plan.source}: {sizes}")
    log.say(f"model  {name}: {numel:,} parameters, computing in {options.precision} through {options.engine}")
    if task.random:
        names = ", ".join(task.random[:3])
        log.say(f"warning: {options.hf} lacks {len(task.random)} weights, which start at random: {names} ...")
    log.say(f"run    {folder}" + (f", resumed after step {done}" if done else ""))
    for line in unit_lines(rows):
        log.say(line)
    return log


@torch.no_grad()
def sample(sharded: Sharded, data: Data, options: TrainOptions, tokenizer: Any | None, device: torch.device) -> str:
    """The start of the validation text, and how the model goes on, drawn at temperature 0.8. **Collective.**

    Every rank draws for itself; they call the model equally often. Models whose output is not logits are not asked.
    """
    length = min(_PROMPT, options.context)
    tokens = torch.from_numpy(data.validation[np.arange(length)]).to(device).unsqueeze(0)
    random = torch.Generator(device).manual_seed(options.seed)
    was_training = sharded.model.training
    sharded.model.eval()
    for _ in range(options.sample):
        seen = tokens[:, -options.context :]
        logits = logits_of(sharded.model, seen)
        if not isinstance(logits, Tensor) or logits.shape[:2] != seen.shape or logits.dim() != 3:
            return "sample           none: the model's output is not logits [rows, length, vocabulary]"
        weights = torch.softmax(logits[:, -1].float() / _TEMPERATURE, -1)
        tokens = torch.cat([tokens, torch.multinomial(weights, 1, generator=random)], 1)
    sharded.model.train(was_training)

    def text_of(ids: Sequence[int]) -> str:
        if tokenizer is not None:
            return str(tokenizer.decode(ids))
        if data.bytes_per_token is None:
            return " ".join(map(str, ids))
        return bytes(token % 256 for token in ids).decode("utf-8", errors="replace")

    prompt, written = (text_of(part) for part in (tokens[0, :length].tolist(), tokens[0, length:].tolist()))
    lines = [printable(line) for line in f"{prompt}|{written}".split("\n")]
    return "\n".join(
        ["sample           the text before | is given, the rest is the model's", *(f"  {x}" for x in lines)]
    )
