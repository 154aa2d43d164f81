"""Trains LoRA adapters of peft: torchrun --nproc-per-node 2 hf_lora.py"""

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn.wrap import ModuleWrapPolicy

FOLDER = "lora-adapter"


def build():
    """The same base model in every process; in real life, `LlamaForCausalLM.from_pretrained(...)`."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=512
        )
    )


dist.init_process_group("gloo")  # "nccl" on GPUs
model = get_peft_model(build(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))

# Add the adapters first, then wrap: what is added to a sharded model raises. With `use_orig_params` the frozen base
# weights take no memory for gradients, and are not reduced.
model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}), use_orig_params=True)
trained = [param for param in model.parameters() if param.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)

torch.manual_seed(1 + dist.get_rank())  # every rank reads its own data
tokens = torch.randint(512, (4, 32))
losses = []
for step in range(5):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

state = model.state_dict()  # whole tensors: every rank must call it
name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"
weight = state[name].clone()
if dist.get_rank() == 0:
    model.save_pretrained(FOLDER, state_dict=state)  # peft keeps the adapters only
dist.barrier()
loaded = PeftModel.from_pretrained(build(), FOLDER)
assert torch.equal(loaded.state_dict()[name], weight)
print(f"rank {dist.get_rank()}: loss {losses[0]:.2f} -> {losses[-1]:.2f}, adapter saved to {FOLDER}")
dist.destroy_process_group()
