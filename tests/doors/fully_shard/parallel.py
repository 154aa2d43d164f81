"""Tensor-parallel models, sharded by PyTorch's ``fully_shard`` or ours, and their training."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.kit import rank_device

VOCAB, DIM = 12, 8


class Block(nn.Module):
    def __init__(self, hidden, recomputes):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, hidden)
        self.down = nn.Linear(hidden, DIM)
        self.recomputes = recomputes

    def forward(self, x):
        if self.recomputes:
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)

    def inner(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """With ``hidden`` 10, two tensor-parallel ranks have 5 rows each, which two ranks cannot share evenly."""

    def __init__(self, hidden=10, recomputes=False):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block(hidden, recomputes) for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


NAMES = {2: ("dp", "tp"), 3: ("replicate", "shard", "tp")}


def mesh_of(*shape):
    """A mesh of ``shape`` whose last dimension is tensor-parallel, and its data-parallel part."""
    names = NAMES[len(shape)]
    mesh = init_device_mesh(rank_device().type, shape, mesh_dim_names=names)
    return mesh, mesh[names[0]] if len(names) == 2 else mesh[names[:-1]]


def parallelized(mesh, hidden=10, recomputes=False, ties=False, device=None, seed=0):
    """A `Net` in which all parameters are DTensors on the tensor-parallel part of ``mesh``."""
    torch.manual_seed(seed)
    with torch.device(device or rank_device()):
        model = Net(hidden, recomputes)
    outer = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    inner = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh["tp"], outer)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], inner)
    if ties:
        model.head.weight = model.tokens.weight
    return model


def sharded(engine, model, mesh, **options):
    """``model``, each block and the rest sharded by ``engine``, a ``fully_shard``."""
    for block in model.blocks:
        engine(block, mesh=mesh, **options)
    engine(model, mesh=mesh, **options)
    return model


def distributed(mesh, **options):
    """A `Net` in which all parameters are DTensors on the whole ``mesh``, and linear ones cut over ``tp``."""
    torch.manual_seed(0)
    model = Net(**options)
    cut = {}
    for block in model.blocks:
        cut |= {block.up.weight: Shard(0), block.up.bias: Shard(0), block.down.weight: Shard(1)}
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None:
                placements = [Replicate()] * (mesh.ndim - 1) + [cut.get(param, Replicate())]
                module._parameters[name] = nn.Parameter(distribute_tensor(param.detach(), mesh, placements))
    return model


@dataclass
class Batches:
    """Batches of each data-parallel rank; as DTensors on ``mesh`` if given."""

    part: int
    mesh: Any = None

    def loss(self, model, step):
        if self.mesh is None:
            generator = torch.Generator().manual_seed(10 * step + self.part)
            tokens = torch.randint(0, VOCAB, (2, 4), generator=generator, device="cpu").to(rank_device())
            return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.roll(1, 1).flatten())
        mesh = self.mesh
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, VOCAB, (8, 4), generator=generator, device="cpu").to(rank_device())
        placements = [Replicate() if name == "tp" else Shard(0) for name in mesh.mesh_dim_names]
        given = distribute_tensor(tokens, mesh, placements)
        out = model(given).redistribute(placements=placements).to_local()
        return F.cross_entropy(out.flatten(0, 1), given.to_local().roll(1, 1).flatten())


def train(model, batches, num_steps=2, accumulates=(), optimizer=None, clips=True):
    """Loss and gradient norm of each step; ``accumulates``: methods that are False in the first of two passes."""
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    figures = []
    for step in range(num_steps):
        for last in (False, True) if accumulates else (True,):
            for name in accumulates:
                getattr(model, name)(last)
            loss = batches.loss(model, 2 * step + last)
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0) if clips else torch.zeros(())
        figures.append((loss.item(), norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item()))
        optimizer.step()
        optimizer.zero_grad()
    return figures, optimizer


def whole(model):
    """The whole values of the parameters, by name."""
    return {name: value.full_tensor() for name, value in model.state_dict().items()}
