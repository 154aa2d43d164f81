"""A training script for PyTorch's ``fully_shard``, without anything of fairshard.

    torchrun --nproc-per-node 2 tests/data/fsdp2_script.py
    torchrun --nproc-per-node 4 tests/data/fsdp2_script.py    # two replicas of two shards

Trains a small GPT, saves it with torch.distributed.checkpoint, and continues from the checkpoint in a new model.
"""

import itertools
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F

VOCAB, DIM, LAYERS, CONTEXT = 61, 20, 3, 12
PRECISIONS = {
    "fp32": fsdp.MixedPrecisionPolicy(),
    "bf16": fsdp.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM)
        self.mlp_norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 3 * DIM + 1)
        self.down = nn.Linear(3 * DIM + 1, DIM)

    def forward(self, x):
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, 2, DIM // 2)).movedim(-3, 0).transpose(-2, -3)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).flatten(-2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.positions = nn.Embedding(CONTEXT, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mesh_of(world_size):
    if world_size == 4:
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (world_size,))


def sharded_gpt(mesh, precision, seed):
    torch.manual_seed(seed)
    model = GPT()
    how = {"mesh": mesh, "mp_policy": PRECISIONS[precision], "offload_policy": fsdp.OffloadPolicy()}
    for block in model.blocks:
        fully_shard(block, **how)
    fully_shard([model.norm, model.head], reshard_after_forward=False, **how)
    fully_shard(model, **how)
    assert isinstance(model, FSDPModule)
    for this, following in itertools.pairwise(model.blocks):
        this.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([this])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def batch(part):
    starts = torch.tensor([[7 * part], [11 * dist.get_rank()]])
    return (starts + torch.arange(CONTEXT + 1)) % VOCAB


def train(model, optimizer, num_steps, parts=2):
    figures = []
    for _ in range(num_steps):
        losses = []
        for part in range(parts):
            model.set_requires_gradient_sync(part == parts - 1)
            tokens = batch(part)
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()) / parts
            loss.backward()
            losses.append(loss.item())
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        figures.append((sum(losses), norm.full_tensor().item()))
    return figures


def save(model, optimizer, folder):
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)


def load(model, optimizer, folder):
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def run(folder, precision):
    """Losses and gradient norms of every step, whole weights, and this rank's part of the optimizer's state."""
    mesh = mesh_of(dist.get_world_size())
    model, optimizer = sharded_gpt(mesh, precision, seed=0)
    figures = train(model, optimizer, 3)
    save(model, optimizer, folder)
    model, optimizer = sharded_gpt(mesh, precision, seed=1)
    load(model, optimizer, folder)
    figures += train(model, optimizer, 2)
    weights = {name: param.full_tensor() for name, param in model.state_dict().items()}
    moments = {
        name: optimizer.state[param]["exp_avg_sq"].to_local().clone() for name, param in model.named_parameters()
    }
    return figures, weights, moments


if __name__ == "__main__":
    dist.init_process_group("gloo")
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    for loss, norm in run(shared[0], "bf16")[0]:
        print(f"rank {dist.get_rank()}: loss {loss:.4f}, norm {norm:.4f}")
    dist.destroy_process_group()
