"""The work of a rank that trains: steps of an engine, by phase, with losses, memory and traffic."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import measure
import torch
from rank import Rank

PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Training:
    """What is trained."""

    engine: str
    model: str
    steps: int
    precision: str = "fp32"
    accumulate: int = 1
    """Backwards of a step."""
    is_offloaded: bool = False
    """Shards and optimizer state in host memory, exact clipping, and on an accelerator activation checkpointing."""
    counts: str = ""
    """Count collectives in one more, untimed step, in this phase of it, or in the whole ``"step"``."""


def train(rank: Rank, **settings: Any) -> dict[str, Any]:
    """Train as `Training` says."""
    import engines
    from models import MODELS, build_gpt, checkpoint_blocks, random_batches

    job = Training(**settings)
    config = MODELS[job.model]
    with rank.device:
        gpt = build_gpt(config)
    if job.is_offloaded and rank.is_accelerated:
        checkpoint_blocks(gpt)
    options = engines.Options(
        bf16=job.precision == "bf16",
        device=rank.device,
        batch=config.batch,
        accumulate=job.accumulate,
        is_offloaded=job.is_offloaded,
        max_norm=1.0 if job.is_offloaded else None,
    )
    engine = engines.build(job.engine, gpt, gpt.blocks, options)
    batches = (tuple(part.to(rank.device) for part in pair) for pair in random_batches(config, rank.rank))
    step = _Step(engine, rank, job.accumulate)
    losses, times = [], []
    for number in range(job.steps):
        own = [next(batches) for _ in range(job.accumulate)]
        with rank.turn():
            loss, seconds = step.run(own)
        losses.append(loss)
        times.append(seconds)
        if number == 1:  # by now every buffer and optimizer state exists
            rank.reset_peak()
    peak = rank.peak_bytes()
    counted = None
    if job.counts:
        with rank.turn():
            counted = step.count([next(batches) for _ in range(job.accumulate)], job.counts)
    by_phase = {phase: [seconds[phase] for seconds in times] for phase in times[0]}
    return {"losses": losses, "times": by_phase, "peak_bytes": peak, "collectives": counted}


class _Step:
    """Runs steps. On an accelerator the phases' times are the host's, and the device's rest counts to the last one."""

    def __init__(self, engine: Any, rank: Rank, accumulate: int):
        self._engine, self._rank, self._accumulate = engine, rank, accumulate

    def run(self, batches: list[Any]) -> tuple[float, dict[str, float]]:
        """Run one step; its loss, the seconds of its phases, and the CPU seconds that its threads spent in them."""
        self._rank.synchronize()
        seconds = dict.fromkeys(PHASES, 0.0)
        cpu = time.process_time()
        loss = self._gradients(batches, seconds)
        start = time.perf_counter()
        self._engine.step()
        self._rank.synchronize()
        seconds["optimizer"] = time.perf_counter() - start
        seconds["cpu"] = time.process_time() - cpu
        self._engine.finish()
        return float(loss), seconds

    def count(self, batches: list[Any], phase: str) -> dict[str, Any]:
        """Run one step under `measure.CommCounter`, and add fairshard's own counters where it runs."""
        if phase == "optimizer":
            self._gradients(batches, dict.fromkeys(PHASES, 0.0))
        own = measure.loaded_module("collectives", "reset_counters")
        if own is not None:
            own.reset_counters()
        with measure.CommCounter(torch.distributed.get_world_size()) as counter:
            if phase == "optimizer":
                self._engine.step()
            else:
                self.run(batches)
        counters = own.counters() if own is not None else None
        return {"counts": counter.counts, "received_bytes": counter.received, "own_counters": counters}

    def _gradients(self, batches: list[Any], seconds: dict[str, float]) -> torch.Tensor:
        total = torch.zeros(())
        for number, batch in enumerate(batches, 1):
            start = time.perf_counter()
            loss = self._engine.forward(*batch) / self._accumulate
            middle = time.perf_counter()
            self._engine.backward(loss, number == len(batches))
            seconds["forward"] += middle - start
            seconds["backward"] += time.perf_counter() - middle
            total = total.to(loss.device) + loss.detach()
        return total
