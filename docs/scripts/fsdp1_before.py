"""A training script for FSDP1: torchrun --nproc-per-node 2 fsdp1_before.py"""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

dist.init_process_group("gloo")  # "nccl" on GPUs
torch.manual_seed(0)
layers = [nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)]
model = FSDP(
    nn.Sequential(nn.Linear(8, 32), *layers, nn.Linear(32, 1)),
    sharding_strategy=ShardingStrategy.FULL_SHARD,
    mixed_precision=MixedPrecision(reduce_dtype=torch.float32),
    auto_wrap_policy=functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer}
    ),
    use_orig_params=True,
    device_id=torch.device("cpu"),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

torch.manual_seed(1 + dist.get_rank())
for step in range(4):
    with model.no_sync():
        model(torch.randn(4, 10, 8)).square().mean().backward()
    loss = model(torch.randn(4, 10, 8)).square().mean()
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()

with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
    state = model.state_dict()
    moments = FSDP.optim_state_dict(model, optimizer)
if dist.get_rank() == 0:
    torch.save({"model": state, "optimizer": moments}, "whole.pt")
print(f"rank {dist.get_rank()}: loss {loss.item():.4f}")
dist.destroy_process_group()
