"""One rank of ``fairshard train``: set up, train, validate, report."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from fairshard.checkpoint import Checkpointer, Preempted, Preemption, on_preemption
from fairshard.checkpoint.preemption import STATUS
from fairshard.checkpoint.run_lock import release_all
from fairshard.cli.failure import describe, is_ending, note_end, note_start, other_failed, record_failure
from fairshard.cli.gpt import GPT, GPTConfig, wrap_nested
from fairshard.cli.meeting import meeting
from fairshard.cli.metrics import make_run_folder
from fairshard.cli.options import COMPUTE_DTYPES, TrainOptions
from fairshard.cli.progress import say, size_text
from fairshard.cli.ranks import Ranks, default_threads
from fairshard.cli.resume import CHECKPOINTS, elastic_job, text_entry, write_steps
from fairshard.cli.run_log import RunLog
from fairshard.cli.text import TextPlan, load
from fairshard.cli.trace import traced
from fairshard.cli.trainer import Trainer, TrainingStopped
from fairshard.errors import CheckpointError
from fairshard.nn import FullyShardedDataParallel
from fairshard.planning.summary import UnitRow, unit_lines, unit_table
from fairshard.utils.device import peak_memory, set_device
from fairshard.utils.host import visible_cpus
from fairshard.utils.messages import gather_objects, gather_scalars, host_group
from fairshard.version import __version__

_NOTICE_S = 0.5
_POLL_S = 0.05


def train_rank(options: TrainOptions, ranks: Ranks, plan: TextPlan, quiet: bool) -> None:
    """Train as one rank. **Collective.** Ends the process with exit code 1 on failure, and 130 on Ctrl-C.

    A signal that asks to stop ends it with exit code 75 once the step is saved; if ``quiet``, the function returns.

    Args:
        quiet: print no error, and note a stop in a file: the launcher reports it, and knows the exit code.
    """
    signal.signal(signal.SIGINT, _interrupted)
    note_start()
    preemption = on_preemption(None, signals=options.stop_signals, grace=options.grace)
    preemption.is_hopeless = other_failed
    try:
        device = _join(options, ranks)
        _train(options, ranks, plan, device, preemption)
        note_end()
        threading.Thread(target=_leave_with_launcher, args=(0,), daemon=True).start()
        dist.destroy_process_group()
    except Preempted as stop:
        note_end(stopped_after=stop.step)
        if not quiet:
            _leave(STATUS)
        threading.Thread(target=_leave_with_launcher, args=(STATUS,), daemon=True).start()
        dist.destroy_process_group()
    except Exception as error:
        expected = isinstance(error, TrainingStopped)
        record_failure(error, ranks.rank, expected)
        if not quiet:
            print(f"fairshard train: error (rank {ranks.rank}): {describe(error, expected)}", file=sys.stderr)
        # If a peer was killed, its death is the cause to report: give the launcher time to see it first.
        time.sleep(_NOTICE_S)
        _leave(1)


def build_model(options: TrainOptions, device: torch.device) -> FullyShardedDataParallel:
    """Build the sharded GPT: one unit per block, and a root unit for the rest. **Collective.**"""
    dtype = COMPUTE_DTYPES.get(options.precision)

    def wrap(module: nn.Module) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(
            module.to(device),
            reshard_after_forward=options.reshard_after_forward,
            mixed_precision=dtype is not None,
            compute_dtype=dtype,
            bucket_cap_mb=options.bucket_cap_mb,
            cpu_offload=options.cpu_offload,
            move_grads_to_cpu=options.move_grads_to_cpu,
        )

    torch.manual_seed(options.seed)
    model = wrap_nested(GPT(GPTConfig(options.layers, options.dim, options.heads, options.context)), wrap)
    assert isinstance(model, FullyShardedDataParallel)
    return model


def _join(options: TrainOptions, ranks: Ranks) -> torch.device:
    """Set threads and device, and create the process group. **Collective.**"""
    torch.set_num_threads(options.threads or default_threads(ranks.local_size))
    if options.device_type == "cpu":
        dist.init_process_group("gloo", **meeting(options.timeout_s))
        return torch.device("cpu")
    device = torch.device(options.device_type, ranks.local_rank)
    set_device(device)
    # torch asks every later group for its backend of `device_id`, and a gloo group has one for these types only.
    bound = device if device.type in dist.Backend.backend_capability["gloo"] else None
    met = meeting(options.timeout_s)
    dist.init_process_group(dist.get_default_backend_for_device(device), device_id=bound, **met)
    return device


def _train(
    options: TrainOptions, ranks: Ranks, plan: TextPlan, device: torch.device, preemption: Preemption
) -> None:
    model = build_model(options, device)
    trainer = Trainer(model, load(plan), options, ranks, device)
    rows = unit_table(model)
    own = make_run_folder(options.out) if ranks.rank == 0 else None
    folder: Path = gather_objects(own, host_group())[0]
    checkpointer = Checkpointer(
        folder / CHECKPOINTS,
        every=max(1, options.save_every),
        keep_last=options.keep_last,
        memory_every=options.memory_every or None,
    )
    try:
        checkpointer.lock()
    except CheckpointError as error:
        raise TrainingStopped(str(error)) from error
    done = trainer.load(checkpointer, options.resume_from) if options.resume else 0
    saved = done
    with _begin(options, ranks, plan, rows, folder, done) if ranks.rank == 0 else contextlib.nullcontext() as log:
        for step in range(done + 1 if done else 0, options.steps + 1):
            if step > 0:
                is_traced = step == options.trace
                with traced(model, folder, step) if is_traced else contextlib.nullcontext():
                    metrics = trainer.step(step)
                if log:
                    log.step(metrics)
            if step % options.eval_every == 0 or step == options.steps:
                val_loss = trainer.validate()
                if log:
                    log.validation(step, val_loss)
            if step and options.memory_every and step % options.memory_every == 0:
                trainer.copy(checkpointer, step)
            if step and options.save_every and (step % options.save_every == 0 or step == options.steps):
                trainer.save(checkpointer, step)
                saved = step
            if step and preemption.is_due() and step < options.steps:
                if saved < step:
                    trainer.save(checkpointer, step)
                checkpointer.close()
                if ranks.rank == 0:
                    _say_stopped(preemption, step, folder)
                raise Preempted(step)
        checkpointer.close()
        peaks = tuple(int(peak) for (peak,) in gather_scalars([peak_memory(device)], device=device))
        if log:
            log.finish(peaks, trainer.places, trainer.copy_wait_s)


def _begin(
    options: TrainOptions, ranks: Ranks, plan: TextPlan, rows: Sequence[UnitRow], folder: Path, done: int
) -> RunLog:
    """Print the setup of a run that starts after step ``done``, and open its files; on rank 0 only."""
    threads = torch.get_num_threads()
    backend = dist.get_backend()
    numel = sum(row.numel for row in rows)
    sizes = f"{size_text(plan.train_nbytes)} to train on, {size_text(plan.validation_nbytes)} to validate on"
    say(
        f"fairshard {__version__}: {_count(ranks.size, 'rank')} on {options.device_type} over {backend}, "
        f"{_count(threads, 'thread')} each ({_count(visible_cpus(), 'CPU')} visible)"
    )
    say(f"text   {plan.source}: {sizes}")
    say(
        f"model  GPT of {options.layers} blocks, width {options.dim}, {options.heads} heads, context "
        f"{options.context}: {numel:,} parameters, computing in {options.precision}"
    )
    say(f"run    {folder}" + (f", resumed after step {done}" if options.resume else ""))
    for line in unit_lines(rows):
        say(line)
    config: dict[str, Any] = {
        "options": asdict(options),
        "world_size": ranks.size,
        "device": options.device_type,
        "backend": backend,
        "threads": threads,
        "parameters": numel,
        "text": text_entry(plan),
        "elastic_job": elastic_job(),
    }
    if options.resume:
        write_steps(replace(options, out=folder))
    return RunLog(folder, options.steps, config, done if options.resume else None)


def _say_stopped(preemption: Preemption, step: int, folder: Path) -> None:
    cause = "a signal to another rank" if preemption.number is None else preemption.number.name
    text = f"stopped by {cause} after step {step}, which is saved. To continue: --resume --out {folder}"
    print(f"fairshard train: {text}", file=sys.stderr, flush=True)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _interrupted(signum: int, frame: FrameType | None) -> NoReturn:
    _leave(130)


def _leave_with_launcher(code: int) -> None:
    """Exit when a signal ends the launcher, which then waits for this process."""
    while not is_ending():
        time.sleep(_POLL_S)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """Exit immediately: destroying a process group whose peers are gone can hang."""
    release_all()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
