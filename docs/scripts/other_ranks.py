"""Trains for ten more steps on any number of ranks: torchrun --nproc-per-node 2 other_ranks.py, then with 3."""

import torch
import torch.distributed as dist
from torch import nn

from fairshard.checkpoint import Checkpointer
from fairshard.nn import FullyShardedDataParallel as FSDP

BATCH = 12  # of all ranks together: 2, 3, 4 and 6 ranks divide it

dist.init_process_group("gloo")  # "nccl" on GPUs
torch.manual_seed(0)
blocks = [FSDP(nn.Sequential(nn.Linear(16, 16), nn.Tanh())) for _ in range(3)]
model = FSDP(nn.Sequential(*blocks, nn.Linear(16, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

with Checkpointer("checkpoints", every=5) as checkpointer:
    start = checkpointer.load_latest(model, optimizer) or 0  # saved by any number of ranks
    for step in range(start + 1, start + 11):
        whole = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step))
        own = whole.chunk(dist.get_world_size())[dist.get_rank()]
        loss = (model(own) - own[:, :1]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.maybe_save(step, model, optimizer)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: steps {start + 1} to {step}, loss {loss.item():.4f}")
dist.destroy_process_group()
