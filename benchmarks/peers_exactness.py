"""Which combinations with CPU offload give a peer other weights than plain data parallelism.

    python benchmarks/peers_exactness.py

Two gloo ranks train a small model for four steps of SGD with momentum in fp32, in every combination of
{accumulation: none, no_sync, sharded} x {clip: no, yes} x {zero_grad to None, to zero}, each in fresh processes. The
weights must equal those of DDP to a relative 1e-5. A peer that cannot run at all says why.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from launch import RunFailed, launch
from report import table
from torch import nn

PEERS = ("fairshard", "fsdp1", "fsdp2", "fairscale")
CELLS = tuple(itertools.product(("none", "no_sync", "sharded"), (False, True), (True, False)))


@dataclass(frozen=True)
class Job:
    """What `launch` hands to a rank."""

    peer: str
    accumulate: str
    clip: bool
    to_none: bool
    threads: int
    rank: int
    store: str
    result: str


def work(job: Job) -> dict[str, Any]:
    """Train and return the whole weights as one list."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{job.store}", rank=job.rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
    model, clip, no_sync, whole = _wrap(job.peer, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    passes = 1 if job.accumulate == "none" else 3
    for step in range(4):
        for index in range(passes):
            torch.manual_seed(100 * step + 10 * index + job.rank)
            quiet = job.accumulate == "no_sync" and index < passes - 1
            with no_sync() if quiet else contextlib.nullcontext():
                model(torch.randn(4, 6)).square().sum().backward()
        if job.clip:
            clip(0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=job.to_none)
    return {"weights": torch.cat([value.flatten() for value in whole()]).tolist()}


def _wrap(peer: str, model: nn.Module) -> tuple[nn.Module, Any, Any, Any]:
    """The wrapped model, and how it clips, goes without synchronisation, and shows its whole weights."""
    if peer == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        wrapped = DistributedDataParallel(model)
        return wrapped, _torch_clip(wrapped), wrapped.no_sync, lambda: [p.detach() for p in wrapped.parameters()]
    if peer == "fsdp2":
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        for module in (model[0], model[2], model):
            fully_shard(module, offload_policy=CPUOffloadPolicy(pin_memory=torch.cuda.is_available()))

        @contextlib.contextmanager
        def no_sync():
            model.set_requires_gradient_sync(False)
            yield
            model.set_requires_gradient_sync(True)

        return model, _torch_clip(model), no_sync, lambda: [p.full_tensor() for p in model.parameters()]
    if peer == "fsdp1":
        from torch.distributed.fsdp import CPUOffload
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        settings = {"cpu_offload": CPUOffload(offload_params=True), "device_id": torch.device("cpu")}
    elif peer == "fairscale":
        from fairscale.nn import FullyShardedDataParallel as FSDP

        settings = {"cpu_offload": True, "mixed_precision": True, "compute_dtype": torch.float32}
    else:
        from fairshard.nn import FullyShardedDataParallel as FSDP

        settings = {"cpu_offload": True}
    wrapped = FSDP(nn.Sequential(FSDP(model[0], **settings), model[1], FSDP(model[2], **settings)), **settings)
    return wrapped, wrapped.clip_grad_norm_, wrapped.no_sync, lambda: list(wrapped.state_dict().values())


def _torch_clip(model: nn.Module) -> Any:
    return lambda max_norm: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def main() -> int:
    if len(sys.argv) > 1:
        job = Job(**json.loads(sys.argv[1]))
        Path(job.result).write_text(json.dumps(work(job)))
        os._exit(0)
    rows = [["accumulate, clip, zero_grad", *PEERS]]
    reasons: dict[str, str] = {}
    for accumulate, clip, to_none in CELLS:
        job = {"accumulate": accumulate, "clip": clip, "to_none": to_none, "threads": 1}
        expected = torch.tensor(launch("peers_exactness.py", {**job, "peer": "ddp"}, 2, 120)[0]["weights"])
        row = [f"{accumulate}, {'clip' if clip else 'no clip'}, {'None' if to_none else 'zero'}"]
        for peer in PEERS:
            try:
                ranks = launch("peers_exactness.py", {**job, "peer": peer}, 2, 120)
            except RunFailed as error:
                reasons.setdefault(peer, str(error))
                row.append("cannot run")
                continue
            error = max((torch.tensor(rank["weights"]) - expected).norm() / expected.norm() for rank in ranks)
            row.append("right" if error < 1e-5 else f"wrong by {error:.1%}")
        rows.append(row)
    print(table(rows))
    for peer, reason in reasons.items():
        print(f"{peer}: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
