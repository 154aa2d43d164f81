"""One rank of ``fairshard train``: set up, train, validate, report."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fairshard import __version__
from fairshard.checkpoint import Checkpointer
from fairshard.cli.failure import describe, record_failure
from fairshard.cli.gpt import GPT, GPTConfig, wrap_nested
from fairshard.cli.metrics import make_run_folder
from fairshard.cli.options import COMPUTE_DTYPES, TrainOptions
from fairshard.cli.progress import say, size_text
from fairshard.cli.ranks import Ranks, default_threads
from fairshard.cli.resume import CHECKPOINTS
from fairshard.cli.run_log import RunLog
from fairshard.cli.text import TextPlan, load
from fairshard.cli.trace import traced
from fairshard.cli.trainer import Trainer, TrainingStopped
from fairshard.nn import FullyShardedDataParallel
from fairshard.plan.summary import UnitRow, unit_lines, unit_table
from fairshard.utils.device import peak_memory, set_device
from fairshard.utils.host import visible_cpus
from fairshard.utils.messages import gather_objects, gather_scalars, host_group

_NOTICE_S = 0.5


def train_rank(options: TrainOptions, ranks: Ranks, plan: TextPlan, quiet: bool) -> None:
    """Train as one rank. **Collective.** Ends the process with exit code 1 on failure, and 130 on Ctrl-C.

    Args:
        quiet: print no error; the launcher reports it.
    """
    signal.signal(signal.SIGINT, _interrupted)
    try:
        device = _join(options, ranks)
        _train(options, ranks, plan, device)
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
        dist.init_process_group("gloo", **_rendezvous())
        return torch.device("cpu")
    device = torch.device(options.device_type, ranks.local_rank)
    set_device(device)
    # torch asks every later group for its backend of `device_id`, and a gloo group has one for these types only.
    bound = device if device.type in dist.Backend.backend_capability["gloo"] else None
    dist.init_process_group(dist.get_default_backend_for_device(device), device_id=bound, **_rendezvous())
    return device


def _rendezvous() -> dict[str, Any]:
    """Arguments of the rendezvous for ranks restarted on one host: a store with a prefix for each attempt.

    torch's agent keeps one store for all attempts (2.13). Without the prefix a rank may connect to the address of a
    dead rank instead of its successor's.
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    if not attempt or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return {}
    store, rank, world_size = next(rendezvous("env://"))
    return {"store": PrefixStore(f"attempt-{attempt}", store), "rank": rank, "world_size": world_size}


def _train(options: TrainOptions, ranks: Ranks, plan: TextPlan, device: torch.device) -> None:
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
    done = trainer.load(checkpointer, options.resume_from) if options.resume else 0
    with _begin(options, ranks, plan, rows, folder, done) if ranks.rank == 0 else contextlib.nullcontext() as log:
        for step in range(done + 1 if done else 0, options.steps + 1):
            if step > 0:
                is_traced = step == options.trace
                with traced(model, folder, step, ranks.rank) if is_traced else contextlib.nullcontext():
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
        "text": {
            "source": plan.source,
            "train_bytes": plan.train_nbytes,
            "validation_bytes": plan.validation_nbytes,
        },
    }
    return RunLog(folder, options.steps, config, done if options.resume else None)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _interrupted(signum: int, frame: FrameType | None) -> NoReturn:
    _leave(130)


def _leave(code: int) -> NoReturn:
    """Exit immediately: destroying a process group whose peers are gone can hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
