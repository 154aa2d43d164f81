"""One rank of one training run: ``python worker.py JOB``, with `Job` as JSON. Started by `launch`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure
import torch
from turn import Turn

UNSAMPLED = 3
"""First steps of which no samples are taken."""


@dataclass(frozen=True)
class Job:
    """What `launch` hands to a rank."""

    engine: str
    model: str
    precision: str
    world: int
    threads: int
    steps: int
    count: bool
    """Count collectives in one more, untimed step at the end."""
    rank: int
    store: str
    result: str
    device: str = "cpu"
    turn: Sequence[str] = ()
    """Pipes through which several engines take turns; see `launch.launch_in_turns`."""
    perf: str = ""
    """File for the samples of rank 0's steps after the first `UNSAMPLED`; see `lanes.py`."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step's phases on this rank, and the CPU seconds that its threads spent in all of them."""

    forward: float
    backward: float
    optimizer: float
    cpu: float


def main() -> None:
    # Memory is counted from here, so nothing but torch may be imported at the top of this file.
    resident_at_start = measure.resident_bytes()
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(job.threads)
    import torch.distributed as dist
    from accelerator import Accelerator

    accelerator = Accelerator(job.device, job.rank)
    accelerator.join(job.store, job.rank, job.world)
    result = _train(job, accelerator, resident_at_start)
    Path(job.result).write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # gloo groups sometimes hang while Python drops its last references


def _train(job: Job, accelerator: Any, resident_at_start: int) -> dict[str, Any]:
    import engines
    import torch.distributed as dist
    from models import MODELS, build_gpt, random_batches
    from perf import STEP_HZ, Samples

    config = MODELS[job.model]
    with accelerator.device:
        gpt = build_gpt(config)
    options = engines.Options(bf16=job.precision == "bf16", batch=config.batch, device=accelerator.device)
    engine = engines.build(job.engine, gpt, gpt.blocks, options)
    batches = (tuple(part.to(accelerator.device) for part in pair) for pair in random_batches(config, job.rank))

    losses, times = [], []
    turn = Turn.open(job.turn) if job.turn and job.rank == 0 else None
    samples = Samples(job.perf if job.rank == 0 else "", STEP_HZ)
    for step in range(job.steps):
        if step == UNSAMPLED:
            samples.start()
        if turn is not None:
            turn.wait()
        batch = next(batches)
        dist.barrier()
        loss, seconds = _step(engine, accelerator, *batch)
        if job.turn:
            dist.barrier()
        if turn is not None:
            turn.pass_on()
        losses.append(loss)
        times.append(vars(seconds))
        if step == 1:  # by now every buffer and optimizer state exists
            accelerator.reset_peak()
    samples.stop()
    peak = accelerator.peak_bytes(resident_at_start)
    counted = _count_collectives(engine, accelerator, next(batches), job) if job.count else None
    by_part = {part: [step[part] for step in times] for part in times[0]}
    return {"losses": losses, "times": by_part, "peak_bytes": peak, "collectives": counted}


def _step(engine: Any, accelerator: Any, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[float, StepTime]:
    """Run one step. On an accelerator the parts' times are the host's, and the device's rest counts to the last one."""
    accelerator.synchronize()
    cpu = time.process_time()
    start = time.perf_counter()
    loss = engine.forward(tokens, targets)
    forward = time.perf_counter()
    engine.backward(loss)
    backward = time.perf_counter()
    engine.step()
    accelerator.synchronize()
    end = time.perf_counter()
    cpu = time.process_time() - cpu
    return loss.item(), StepTime(forward - start, backward - forward, end - backward, cpu)


def _count_collectives(
    engine: Any, accelerator: Any, batch: tuple[torch.Tensor, torch.Tensor], job: Job
) -> dict[str, Any]:
    """Run one step under `measure.CommCounter`, and add fairshard's own counters where it runs."""
    own = measure.loaded_module("collectives", "reset_counters")
    if own is not None:
        own.reset_counters()
    with measure.CommCounter(job.world) as counter:
        _step(engine, accelerator, *batch)
    return {
        "counts": counter.counts,
        "received_bytes": counter.received,
        "own_counters": own.counters() if own is not None else None,
    }


if __name__ == "__main__":
    main()
