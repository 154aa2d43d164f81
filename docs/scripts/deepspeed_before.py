"""A training script for DeepSpeed ZeRO-3: deepspeed --num_gpus 2 deepspeed_before.py"""

import deepspeed
import torch
from torch import nn

config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
deepspeed.init_distributed()
torch.manual_seed(0)
layers = [nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)]
model = nn.Sequential(nn.Linear(8, 32), *layers, nn.Linear(32, 1))
engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

torch.manual_seed(1 + engine.global_rank)
for micro_step in range(8):
    loss = engine(torch.randn(4, 10, 8, device=engine.device, dtype=torch.bfloat16)).float().square().mean()
    engine.backward(loss)
    engine.step()  # steps after every second call

engine.save_checkpoint("checkpoints", tag="step-4")
engine.save_16bit_model(".", "weights.bin")
print(f"rank {engine.global_rank}: loss {loss.item():.4f}")
