"""The same script for fairshard: torchrun --nproc-per-node 2 fsdp2_after.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from fairshard.nn import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")  # "nccl" on GPUs
torch.manual_seed(0)
layers = [nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)]
model = nn.Sequential(nn.Linear(8, 32), *layers, nn.Linear(32, 1))
policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
for layer in layers:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

torch.manual_seed(1 + dist.get_rank())
for step in range(4):
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        loss = model(torch.randn(4, 10, 8)).square().mean()
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

weights, moments = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": moments}, checkpoint_id="checkpoint")
print(f"rank {dist.get_rank()}: loss {loss.item():.4f}")
dist.destroy_process_group()
