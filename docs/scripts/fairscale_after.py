"""The same script for fairshard: torchrun --nproc-per-node 2 fairscale_after.py"""

import torch
import torch.distributed as dist
from torch import nn

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn.wrap import enable_wrap, wrap

dist.init_process_group("gloo")  # on GPUs, "nccl" and `torch.cuda.set_device` as before
torch.manual_seed(0)
options = dict(mixed_precision=True, fp32_reduce_scatter=True, compute_dtype=torch.bfloat16, bucket_cap_mb=25)
with enable_wrap(wrapper_cls=FSDP, **options):
    layers = [wrap(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)) for _ in range(2)]
    model = wrap(nn.Sequential(nn.Linear(8, 32), *layers, nn.Linear(32, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

torch.manual_seed(1 + dist.get_rank())
for step in range(4):
    with model.no_sync():
        model(torch.randn(4, 10, 8)).float().square().mean().backward()
    loss = model(torch.randn(4, 10, 8)).float().square().mean()
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()

state = model.state_dict()  # whole, on every rank
moments = model.gather_full_optim_state_dict(optimizer, recipient_rank=0)
if dist.get_rank() == 0:
    torch.save({"model": state, "optimizer": moments}, "whole.pt")
print(f"rank {dist.get_rank()}: loss {loss.item():.4f}")
dist.destroy_process_group()
