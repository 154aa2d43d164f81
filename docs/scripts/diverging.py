"""Rank 1 runs another module in step 2, as a bug would: torchrun --nproc-per-node 2 diverging.py"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from fairshard.errors import RanksDisagreeError
from fairshard.nn import FullyShardedDataParallel as FSDP


class Experts(nn.Module):
    """Sends the whole batch to one expert: the same one on every rank, or training breaks."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 2)
        self.experts = nn.ModuleList(FSDP(nn.Linear(16, 16)) for _ in range(2))

    def forward(self, x, choice):
        return self.experts[choice](x) + self.router(x).sum()


dist.init_process_group("gloo", timeout=timedelta(seconds=5))  # "nccl" on GPUs
torch.manual_seed(0)
model = FSDP(Experts())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for step in range(1, 4):
        choice = dist.get_rank() if step == 2 else 0  # the bug: in step 2 rank 1 chooses another expert
        model(torch.randn(4, 16), choice).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
except RanksDisagreeError as error:
    print(f"{type(error).__name__}: {error}")
    raise SystemExit(1) from None
