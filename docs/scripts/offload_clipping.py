"""Keeps shards and Adam's state in host memory, and clips exactly: torchrun --nproc-per-node 2 offload_clipping.py"""

import torch
import torch.distributed as dist
from torch import nn

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.optim import CPUOptimizer


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build(**settings):
    """The same model on every rank, a unit for each block."""
    torch.manual_seed(0)
    blocks = [FSDP(Block(64), **settings) for _ in range(4)]
    return FSDP(nn.Sequential(nn.Linear(8, 64), *blocks, nn.Linear(64, 1)), **settings)


def train(model, optimizer, clips):
    """Four steps of two backwards each; return the losses."""
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for step in range(4):
        for _ in range(2):  # gradients accumulate in host memory: none is dropped
            loss = (model(torch.randn(16, 8)) - 1).square().mean()
            loss.backward()
        if clips:
            model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


dist.init_process_group("gloo")  # "nccl" on GPUs
model = build(cpu_offload=True)
optimizer = CPUOptimizer(model, torch.optim.AdamW, lr=1e-3, clip_grad_norm=0.5)  # clips first, then steps
offloaded = train(model, optimizer, clips=False)

model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
assert train(model, optimizer, clips=True) == offloaded  # offload changes no bit
print(f"rank {dist.get_rank()}: losses {offloaded}")
dist.destroy_process_group()
