"""One rank of one offloaded training run: ``python offload_worker.py JOB``, with `Job` as JSON. See offload.py."""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure
import torch

MAX_NORM = 1.0
LR = 1e-4
WARMUP = 3


@dataclass(frozen=True)
class Job:
    """What `launch` hands to a rank."""

    variant: str
    model: str
    device: str
    world: int
    threads: int
    steps: int
    accumulate: int
    rank: int
    store: str
    result: str


@dataclass(frozen=True)
class Trained:
    """A wrapped model and how one step's backward and update are done with it."""

    model: torch.nn.Module
    last_backward: Callable[[torch.Tensor], None]
    update: Callable[[], None]


def main() -> None:
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
    os._exit(0)


def _train(job: Job, accelerator: Any, resident_at_start: int) -> dict[str, Any]:
    import torch.distributed as dist
    import torch.nn.functional as F
    from models import MODELS, build_gpt, random_batches
    from torch.utils.checkpoint import checkpoint

    config = MODELS[job.model]
    with accelerator.device:
        gpt = build_gpt(config)
    if accelerator.is_real:
        for block in gpt.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    trained = BUILDERS[job.variant](gpt, job)
    batches = random_batches(config, job.rank)
    losses, steps, optimizers = [], [], []
    for step in range(job.steps):
        dist.barrier()
        accelerator.synchronize()
        start = time.perf_counter()
        total = 0.0
        for index in range(job.accumulate):
            tokens, targets = (part.to(job.device) for part in next(batches))
            logits = trained.model(tokens)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()) / job.accumulate
            (trained.last_backward if index == job.accumulate - 1 else torch.Tensor.backward)(loss)
            total += loss.detach()
        accelerator.synchronize()
        middle = time.perf_counter()
        trained.update()
        accelerator.synchronize()
        end = time.perf_counter()
        losses.append(float(total))
        steps.append(end - start)
        optimizers.append(end - middle)
        if step == 1:
            accelerator.reset_peak()
    peak = accelerator.peak_bytes(resident_at_start)
    on_cuda = job.device == "cuda"
    return {
        "losses": losses,
        "step_ms": 1e3 * statistics.median(steps[WARMUP:]),
        "optimizer_ms": 1e3 * statistics.median(optimizers[WARMUP:]),
        "peak_bytes": peak,
        "idle": _idle_share(trained, batches, job) if on_cuda else None,
        "limits": _limits(sum(p.numel() for p in trained.model.parameters())) if on_cuda else None,
    }


def _plain(gpt: torch.nn.Module, job: Job) -> Trained:
    """Not sharded: fp32 weights, under autocast on an accelerator."""
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=LR, fused=True)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    if job.device != "cpu":
        gpt.forward = torch.autocast(job.device, torch.bfloat16)(gpt.forward)
    return Trained(gpt, torch.Tensor.backward, update)


def _fairshard(gpt: torch.nn.Module, job: Job, ours: bool, overlap: bool = False, **placement: Any) -> Trained:
    """``overlap``: `CPUOptimizer` steps during the backward, without clipping; otherwise after it, and clips."""
    from engines.engine import wrap_children

    from fairshard.nn import FullyShardedDataParallel as FSDP
    from fairshard.optim import CPUOptimizer

    if job.device != "cpu":
        placement.update(mixed_precision=True, compute_dtype=torch.bfloat16)
    wrap_children(gpt.blocks, lambda block: FSDP(block, **placement))
    model = FSDP(gpt, **placement)
    if not ours:
        plain = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

        def update() -> None:
            model.clip_grad_norm_(MAX_NORM)
            plain.step()
            plain.zero_grad()

        return Trained(model, torch.Tensor.backward, update)
    clip = None if overlap else MAX_NORM
    optimizer = CPUOptimizer(model, torch.optim.AdamW, lr=LR, clip_grad_norm=clip, overlap=overlap)

    def last_backward(loss: torch.Tensor) -> None:
        with optimizer.last_backward():
            loss.backward()

    def finish() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trained(model, last_backward if overlap else torch.Tensor.backward, finish)


def _fsdp2(gpt: torch.nn.Module, job: Job) -> Trained:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if job.device != "cpu" else None)
    for module in [*gpt.blocks, gpt]:
        fully_shard(module, mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=job.device != "cpu"))
    return _plain_update(gpt, lambda: torch.nn.utils.clip_grad_norm_(gpt.parameters(), MAX_NORM))


def _fsdp1(gpt: torch.nn.Module, job: Job) -> Trained:
    from engines.engine import wrap_children
    from torch.distributed.fsdp import CPUOffload, MixedPrecision
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    bf16 = torch.bfloat16
    settings: dict[str, Any] = {
        "device_id": torch.device(job.device, job.rank) if job.device != "cpu" else torch.device("cpu"),
        "cpu_offload": CPUOffload(offload_params=True),
        "mixed_precision": MixedPrecision(bf16, bf16, bf16) if job.device != "cpu" else None,
    }
    wrap_children(gpt.blocks, lambda block: FSDP(block, **settings))
    model = FSDP(gpt, **settings)
    return _plain_update(model, lambda: model.clip_grad_norm_(MAX_NORM))


def _deepspeed(gpt: torch.nn.Module, job: Job) -> Trained:
    if job.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from models import MODELS

    offload = {"device": "cpu", "pin_memory": job.device == "cuda"}
    config = {
        "train_micro_batch_size_per_gpu": MODELS[job.model].batch,
        "gradient_accumulation_steps": job.accumulate,
        "gradient_clipping": MAX_NORM,
        "zero_optimization": {"stage": 3, "offload_optimizer": offload, "offload_param": offload},
        "bf16": {"enabled": job.device == "cuda"},
    }
    adam = DeepSpeedCPUAdam(gpt.parameters(), lr=LR, adamw_mode=True)
    engine, *_ = deepspeed.initialize(model=gpt, optimizer=adam, config=config)
    return Trained(engine, engine.backward, engine.step)


def _plain_update(model: torch.nn.Module, clip: Callable[[], Any]) -> Trained:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def update() -> None:
        clip()
        optimizer.step()
        optimizer.zero_grad()

    return Trained(model, torch.Tensor.backward, update)


BUILDERS: dict[str, Callable[[torch.nn.Module, Job], Trained]] = {
    "plain": _plain,
    "none": functools.partial(_fairshard, ours=False),
    "offload": functools.partial(_fairshard, ours=True, cpu_offload=True),
    "overlap": functools.partial(_fairshard, ours=True, overlap=True, cpu_offload=True),
    "torch-adamw": functools.partial(_fairshard, ours=False, cpu_offload=True),
    "master": functools.partial(_fairshard, ours=True, move_grads_to_cpu=True),
    "held": functools.partial(_fairshard, ours=True, cpu_offload=True, move_grads_to_cpu=False),
    "fsdp2": _fsdp2,
    "fsdp1": _fsdp1,
    "deepspeed": _deepspeed,
}


def _idle_share(trained: Trained, batches: Any, job: Job) -> float:
    """The part of one step in which no kernel ran on the GPU, from torch's profiler."""
    import torch.nn.functional as F
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        start = time.perf_counter()
        tokens, targets = (part.to(job.device) for part in next(batches))
        trained.last_backward(F.cross_entropy(trained.model(tokens).float().flatten(0, 1), targets.flatten()))
        trained.update()
        torch.cuda.synchronize()
        elapsed_us = 1e6 * (time.perf_counter() - start)
    kernels = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    )
    busy = reached = 0.0
    for begin, end in kernels:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return 1.0 - busy / elapsed_us


def _limits(numel: int) -> dict[str, float]:
    """Measured bandwidths, and the time that offloaded AdamW over ``numel`` fp32 elements takes at them."""
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    to_device = _seconds(lambda: device.copy_(host, non_blocking=True))
    to_host = _seconds(lambda: host.copy_(device, non_blocking=True))
    one, other = torch.zeros(1 << 26), torch.zeros(1 << 26)
    memory = _seconds(lambda: one.copy_(other))
    figures = {
        "PCIe to device GB/s": host.nbytes / to_device / 1e9,
        "PCIe to host GB/s": host.nbytes / to_host / 1e9,
        "host memory GB/s (read + write)": 2 * one.nbytes / memory / 1e9,
    }
    figures["PCIe s a step (fp32 down once, up twice)"] = (
        numel * 4 * (1 / figures["PCIe to host GB/s"] + 2 / figures["PCIe to device GB/s"]) / 1e9
    )
    figures["CPU AdamW s a step (28 bytes an element)"] = numel * 28 / figures["host memory GB/s (read + write)"] / 1e9
    return figures


def _seconds(act: Callable[[], Any]) -> float:
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        act()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
