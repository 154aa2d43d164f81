"""A training script for fairscale: it needs GPUs and NCCL."""

import torch
import torch.distributed as dist
from fairscale.nn import FullyShardedDataParallel as FSDP
from fairscale.nn import enable_wrap, wrap
from torch import nn

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
torch.manual_seed(0)
options = dict(mixed_precision=True, fp32_reduce_scatter=True, compute_dtype=torch.bfloat16, bucket_cap_mb=25)
with enable_wrap(wrapper_cls=FSDP, **options):
    layers = [wrap(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)) for _ in range(2)]
    model = wrap(nn.Sequential(nn.Linear(8, 32), *layers, nn.Linear(32, 1))).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

torch.manual_seed(1 + dist.get_rank())
for step in range(4):
    with model.no_sync():
        model(torch.randn(4, 10, 8).cuda()).float().square().mean().backward()
    loss = model(torch.randn(4, 10, 8).cuda()).float().square().mean()
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
