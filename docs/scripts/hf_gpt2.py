"""Trains a GPT-2 of transformers: torchrun --nproc-per-node 2 hf_gpt2.py"""

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn.wrap import ModuleWrapPolicy

FOLDER = "gpt2-trained"

dist.init_process_group("gloo")  # "nccl" on GPUs
torch.manual_seed(0)  # every rank must build the same weights
config = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=512, n_positions=64, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)  # or GPT2LMHeadModel.from_pretrained(...)

# Each block becomes a unit. The root holds the embedding, the last norm and the head, which is tied to the embedding.
model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({GPT2Block}), use_orig_params=True)

# A shard has one dimension, so group by name, never by `param.dim()`.
plain = ("bias", "ln_1.weight", "ln_2.weight", "ln_f.weight")
decayed = [param for name, param in model.named_parameters() if not name.endswith(plain)]
others = [param for name, param in model.named_parameters() if name.endswith(plain)]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2
)

torch.manual_seed(1 + dist.get_rank())  # every rank reads its own data
tokens = torch.randint(512, (4, 32))
losses = []
for step in range(5):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    model.clip_grad_norm_(1.0)  # the norm over all ranks
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

state = model.state_dict()  # whole tensors: every rank must call it
weight = state["transformer.h.0.attn.c_attn.weight"].clone()
if dist.get_rank() == 0:
    model.save_pretrained(FOLDER, state_dict=state)
dist.barrier()
loaded = GPT2LMHeadModel.from_pretrained(FOLDER)
assert torch.equal(loaded.transformer.h[0].attn.c_attn.weight, weight)
print(f"rank {dist.get_rank()}: loss {losses[0]:.2f} -> {losses[-1]:.2f}, saved to {FOLDER}")
dist.destroy_process_group()
