"""Muon on the matrices of the blocks, torch's AdamW on everything else: torch's over FSDP2, and ours; see `NAMES`."""

from __future__ import annotations

import importlib

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.engine import Engine, Options

NAMES = {
    "torch": "torch's Muon over the DTensors of FSDP2",
    "fairshard": "ours over `fully_shard`'s shards, which `step` gathers to the ranks that compute",
    "owned": "ours over `Owned` matrices, which need no gathering",
}


class _WithMuon(Engine):
    """A step is Muon's alone, and begins on all ranks together."""

    def __init__(self, model: nn.Module, muon: type, matrices: list[nn.Parameter], options: Options):
        super().__init__(model, options, muon(matrices, lr=0.02))
        chosen = set(matrices)
        self._others = torch.optim.AdamW([param for param in model.parameters() if param not in chosen], lr=1e-3)

    def backward(self, loss: Tensor, is_last: bool) -> None:
        loss.backward()
        dist.barrier()

    def step(self) -> None:
        self.optimizer.step()

    def finish(self) -> None:
        self._others.step()
        self.model.zero_grad()


def build(name: str, model: nn.Module, units: nn.Module, options: Options) -> Engine:
    """Shard ``model``, and the children of ``units`` first."""
    paths = ("torch.distributed.fsdp", "torch.optim") if name == "torch" else ("fairshard.nn", "fairshard.optim")
    nn_of, optim_of = map(importlib.import_module, paths)
    placement = {}
    if name == "owned":
        placement = {"shard_placement_fn": lambda param: nn_of.Owned() if param.dim() == 2 else None}
    for unit in units.children():
        nn_of.fully_shard(unit, **placement)
    nn_of.fully_shard(model)
    matrices = [param for param in units.parameters() if param.dim() == 2]
    return _WithMuon(model, optim_of.Muon, matrices, options)
