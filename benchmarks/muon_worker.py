"""One rank of ``muon.py``: ``python muon_worker.py JOB``, with `Job` as JSON. Started by `launch`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure import loaded_module
from models import MODELS, build_gpt, random_batches
from rank_job import RankJob
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from turn import Turn


@dataclass(frozen=True)
class Job(RankJob):
    """What `launch` hands to a rank."""

    engine: str
    steps: int
    turn: Sequence[str] = ()


class FunctionalCounter(TorchDispatchMode):
    """Counts the functional collectives that DTensors call, and the bytes of their results from other ranks."""

    def __init__(self, world: int):
        super().__init__()
        self.number, self.nbytes, self._world = 0, 0, world

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # becomes operators on local tensors, and collectives
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and func._opname != "wait_tensor":
            others = {"all_reduce": 2}.get(func._opname, 1) * (self._world - 1)
            self.number += 1
            self.nbytes += result.nbytes * others // self._world
        return result


def main() -> None:
    job = Job.join()
    job.finish(_train(job))


def _train(job: Job) -> dict[str, Any]:
    placement: dict[str, Any] = {}
    if job.engine == "torch":
        from torch.distributed.fsdp import fully_shard
        from torch.optim import Muon
    else:
        from fairshard.nn import Owned, fully_shard
        from fairshard.optim import Muon

        if job.engine == "fairshard-owned":
            placement = {"shard_placement_fn": lambda param: Owned() if param.dim() == 2 else None}
    config = MODELS[job.model]
    gpt = build_gpt(config)
    for block in gpt.blocks:
        fully_shard(block, **placement)
    fully_shard(gpt)
    hidden = [param for param in gpt.blocks.parameters() if param.dim() == 2]
    chosen = set(hidden)
    muon = Muon(hidden, lr=0.02)
    others = torch.optim.AdamW([param for param in gpt.parameters() if param not in chosen], lr=1e-3)
    batches = random_batches(config, job.rank)
    turn = Turn.open(job.turn) if job.turn and job.rank == 0 else None
    losses, seconds = [], []
    for _ in range(job.steps):
        if turn is not None:
            turn.wait()
        losses.append(_backward(gpt, *next(batches)))
        dist.barrier()
        start = time.perf_counter()
        muon.step()
        seconds.append(time.perf_counter() - start)
        others.step()
        gpt.zero_grad()
        dist.barrier()
        if turn is not None:
            turn.pass_on()
    if turn is not None:  # the others may still be timed
        turn.wait()
    _backward(gpt, *next(batches))
    traffic = _traffic(job, muon)
    dist.barrier()
    if turn is not None:
        turn.pass_on()
    return {"losses": losses, "seconds": seconds, **traffic}


def _backward(gpt: nn.Module, tokens: Tensor, targets: Tensor) -> float:
    loss = F.cross_entropy(gpt(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.item()


def _traffic(job: Job, muon: torch.optim.Optimizer) -> dict[str, int]:
    """Collectives of one untimed step, and the bytes that this rank receives.

    fairshard counts what a rank sends to others: over all ranks the same.
    """
    if job.engine == "torch":
        with FunctionalCounter(job.world) as counter:
            muon.step()
        return {"num_collectives": counter.number, "nbytes": counter.nbytes}
    collectives: Any = loaded_module("collectives", "reset_counters")
    collectives.reset_counters()
    muon.step()
    found = collectives.counters().values()
    return {"num_collectives": sum(number for number, _ in found), "nbytes": sum(nbytes for _, nbytes in found)}


if __name__ == "__main__":
    main()
