"""Briefly trained models and optimizers, for tests that save and load their state."""

import torch
import torch.distributed as dist
from torch import nn

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import Owned
from tests.kit import rank_device
from tests.models import mlp, tiny, tiny_batch, tiny_loss, wrap_each, wrap_tiny
from tests.reference import average_grads_, randn

PRECISIONS = {"fp32": {}, "bf16": {"mixed_precision": True, "compute_dtype": torch.bfloat16}}
PLACEMENTS = {
    "device": {},
    "offload": {"cpu_offload": True},
    "master_on_cpu": {"move_grads_to_cpu": True},
}
FLATTEN = [True, False, "orig", "owned"]
OPTIMIZERS = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, foreach=True),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True, foreach=False),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, foreach=False),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.5),
}
WRAPPINGS = {
    "nested": wrap_tiny,
    "whole": lambda model, **kwargs: FSDP(model, **kwargs),
    "inner": lambda model, **kwargs: _wrap_blocks(model, **kwargs),
}


def _wrap_blocks(model, **kwargs):
    """Wrap the blocks of a plain module, which keeps parameters of its own."""
    model.first = FSDP(model.first, **kwargs)
    model.second = FSDP(model.second, **kwargs)
    return model


def layout_of(flatten):
    """Wrapper arguments for a value of `FLATTEN`: flattened, not flattened, with original parameters, or owned ones."""
    if flatten == "owned":
        # Not chosen by what ranks own of other models: local state dicts load into the same owners only.
        return {"use_orig_params": True, "placement_fn": lambda param: Owned(param.numel() % dist.get_world_size())}
    return {"use_orig_params": True} if flatten == "orig" else {"flatten_parameters": flatten}


def another(flatten):
    """The next value in `FLATTEN`."""
    return FLATTEN[(FLATTEN.index(flatten) + 1) % len(FLATTEN)]


def settings_of(cell):
    """Wrapper arguments for a cell of a matrix."""
    return {
        **layout_of(cell["flatten"]),
        **PRECISIONS[cell["precision"]],
        **PLACEMENTS[cell["placement"]],
    }


def train(model, optimizer, steps):
    """Train with this rank's batches of ``steps``; gradients of unsharded parameters are averaged over the ranks."""
    shards = {shard for part in model.modules() if isinstance(part, FSDP) for shard in part.params}
    for step in steps:
        *inputs, targets = tiny_batch(dist.get_rank(), step)
        tiny_loss(model(*inputs), targets).backward()
        average_grads_(param for param in model.parameters() if param not in shards)
        with torch.device("cpu"):  # where optimizers keep their counters, unless a test changes the default device
            optimizer.step()
        optimizer.zero_grad()


def trained(model, optimizer_of, num_steps=2):
    """``model`` and its optimizer after some steps."""
    optimizer = optimizer_of(model.parameters())
    train(model, optimizer, range(num_steps))
    return model, optimizer


def wrapped_tiny(cell, wrapping, seed=1):
    """A `Tiny` wrapped with the settings of a cell of a matrix."""
    if wrapping == "inner" and cell["precision"] != "fp32":
        wrapping = "whole"  # unwrapped parameters would not be cast
    return WRAPPINGS[wrapping](tiny(seed=seed), **settings_of(cell))


class Odd(nn.Module):
    """Hard to shard and to name: one element, no elements, no dimension, buffers, tied and frozen weights."""

    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.tensor([2.0]))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.up = nn.Linear(3, 4)
        self.down = nn.Linear(3, 4)
        self.down.weight = self.up.weight
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x):
        x = self.down(self.frozen(x * self.one + self.none.sum()))
        self.count += 1
        return self.scale * (x + self.up(x[..., :3]))


def odd(seed=1):
    """An `Odd` on this rank's device, the same on every rank."""
    torch.manual_seed(seed)
    model = Odd()
    with torch.no_grad():
        model.scale.add_(seed)
        model.one.sub_(seed)
        model.kept.mul_(seed)
    return model.to(rank_device())


def wrap_odd(model, **kwargs):
    """Wrap an `Odd` as a unit with a unit inside."""
    model.frozen = FSDP(model.frozen, **kwargs)
    return FSDP(model, **kwargs)


def stepped(optimizer_class=torch.optim.AdamW, wrap=wrap_each, **kwargs):
    """A small model and its optimizer after one step."""
    model = wrap(mlp(4, 5, 3))
    optimizer = optimizer_class(model.parameters(), **kwargs)
    model(randn(2, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def full_of(model, optimizer):
    """Full optimizer state, on every rank."""
    return FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)


def shard(state, model, optimizer):
    """The part of the full ``state`` that ``optimizer`` loads on this rank."""
    return FSDP.shard_full_optim_state_dict(state, model, optim=optimizer)
