"""The same script for fairshard: torchrun --nproc-per-node 2 deepspeed_after.py"""

import torch
import torch.distributed as dist
from torch import nn

from fairshard.checkpoint import save
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn.wrap import ModuleWrapPolicy
from fairshard.optim import CPUOptimizer

dist.init_process_group("gloo")  # "nccl" on GPUs, after torch.cuda.set_device(local_rank)
torch.manual_seed(0)
layers = [nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)]
model = FSDP(
    nn.Sequential(nn.Linear(8, 32), *layers, nn.Linear(32, 1)),
    auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}),
    mixed_precision=True,
    compute_dtype=torch.bfloat16,
    cpu_offload=True,  # "offload_param" and "offload_optimizer"
)
optimizer = CPUOptimizer(model, torch.optim.AdamW, lr=1e-3, clip_grad_norm=1.0)

torch.manual_seed(1 + dist.get_rank())
for step in range(4):
    for _ in range(2):  # "gradient_accumulation_steps"; fairshard adds gradients, DeepSpeed averages them
        loss = model(torch.randn(4, 10, 8)).float().square().mean()
        (loss / 2).backward()
    optimizer.step()  # clips first
    optimizer.zero_grad()

save("checkpoints/step-4", model, optimizer, step=4)
state = model.state_dict()  # whole fp32 tensors: every rank must call it
if dist.get_rank() == 0:
    torch.save({name: value.bfloat16() for name, value in state.items()}, "weights.bin")
print(f"rank {dist.get_rank()}: loss {loss.item():.4f}")
dist.destroy_process_group()
