"""Random nets of which each rank reaches different parts in each step, sharded through any of `DOORS`.

All ranks call the same units in the same order; ``hits``, one bool for each choice in a net, select what the loss uses.
They depend only on the seed, the rank and the step, so that one process can compute what all ranks do.
"""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import Owned, fully_shard
from tests.kit import rank_device

DIM = 3
DOORS = ["wrapper", "no_flatten", "orig_params", "fully_shard", "owned"]
CAPS_MB = [0, 0.0005, 25]


class Plain(nn.Module):
    """A residual layer, some of whose parameters may be frozen."""

    num_hits = 0

    def __init__(self, pick):
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)
        frozen = pick.choice(["", "", "", "weight", "weight bias"])
        for name, param in self.layer.named_parameters():
            param.requires_grad_(name not in frozen)

    def forward(self, x, raw, hits):
        return x + torch.tanh(self.layer(x)), ()


class Inside(nn.Module):
    """A layer, and another of the same unit that is used only if it is hit."""

    num_hits = 1

    def __init__(self, pick):
        super().__init__()
        self.always, self.expert = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x, raw, hits):
        return torch.tanh(self.always(x) + (self.expert(x) if hits[0] else 0)), ()


class Routed(nn.Module):
    """Experts that are all called; the output uses only those that are hit."""

    def __init__(self, pick):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(pick.choice([1, 2, 3])))
        self.num_hits = len(self.experts)
        self.gate = nn.Linear(DIM, 1) if pick.random() < 0.5 else None

    def forward(self, x, raw, hits):
        outputs = [torch.tanh(expert(x)) for expert in self.experts]
        used = [output for output, hit in zip(outputs, hits, strict=True) if hit]
        unused = tuple(output for output, hit in zip(outputs, hits, strict=True) if not hit)
        return x + sum(used) * (1 if self.gate is None else self.gate(x)), unused


class Tower(nn.Module):
    """A layer on the net's input, which has no gradient; its output is added only if it is hit."""

    num_hits = 1

    def __init__(self, pick):
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x, raw, hits):
        output = torch.tanh(self.layer(raw))
        return (x + output, ()) if hits[0] else (x.clone(), (output,))


class Around(nn.Module):
    """A layer around an inner one that is always called, but used only if it is hit."""

    num_hits = 1

    def __init__(self, pick):
        super().__init__()
        self.layer, self.inner = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x, raw, hits):
        own = torch.tanh(self.layer(x))
        output = self.inner(own)
        return (x + output, ()) if hits[0] else (x + own, (output,))


class Cut(nn.Module):
    """Blocks the gradient if it is hit; has no parameters."""

    num_hits = 1

    def __init__(self, pick):
        super().__init__()

    def forward(self, x, raw, hits):
        return (x.detach() if hits[0] else x), ()


class Net(nn.Module):
    """Stages, some called twice and some inside checkpoints, and heads, any number of which enter the loss."""

    def __init__(self, pick, checkpoints):
        super().__init__()
        kinds = [Plain, Inside, Routed, Tower, Around]
        self.stages = nn.ModuleList(pick.choice(kinds)(pick) for _ in range(pick.randint(1, 4)))
        if pick.random() < 0.3:
            self.stages.insert(pick.randint(0, len(self.stages)), Cut(pick))
        calls = list(range(len(self.stages)))
        if pick.random() < 0.4:
            calls.insert(pick.randint(0, len(calls)), pick.choice(calls))
        self.heads = nn.ModuleList(nn.Linear(DIM, 2) for _ in range(pick.randint(1, 3)))
        self.scale = nn.Parameter(torch.ones(DIM)) if pick.random() < 0.5 else None
        self.keeps = pick.random() < 0.5
        self.runs = []  # calls, and how they are checkpointed
        while calls:
            length = pick.randint(1, len(calls))
            mode = pick.choice([None, "reentrant", "not_reentrant"]) if checkpoints else None
            if mode == "reentrant" and any(isinstance(self.stages[call], Cut) for call in calls[:length]):
                mode = None  # torch refuses a checkpoint without any gradient
            self.runs.append((calls[:length], mode))
            calls = calls[length:]
        self.num_hits = len(self.heads) + sum(self.stages[c].num_hits for run, _ in self.runs for c in run)

    def forward(self, x, hits):
        """The outputs of the heads that are hit (or of the first), and the unused outputs if the net keeps them."""
        raw, rest, unused = x, list(hits), []
        if self.scale is not None:
            x = x * self.scale
        for calls, mode in self.runs:
            own = [[rest.pop(0) for _ in range(self.stages[call].num_hits)] for call in calls]
            if mode is None:
                x, *others = self._run(calls, own, x, raw)
            else:
                x, *others = checkpoint(self._run, calls, own, x, raw, use_reentrant=mode == "reentrant")
            unused += others
        outputs = [head(x) for head in self.heads]
        chosen = [output for output, hit in zip(outputs, rest, strict=True) if hit] or outputs[:1]
        return chosen, [*unused, *outputs] if self.keeps else []

    def _run(self, calls, hits, x, raw):
        unused = []
        for call, own in zip(calls, hits, strict=True):
            x, others = self.stages[call](x, raw, own)
            unused += others
        return x, *unused


def draw(seed, checkpoints=False):
    """The net of ``seed``, the same on every rank; modules that should become units have ``is_unit``."""
    pick = random.Random(repr(("net", seed)))
    torch.manual_seed(seed)
    net = Net(pick, checkpoints)
    inside = {part for module in net.modules() if isinstance(module, Inside) for part in module.children()}
    for module in net.modules():
        owns = next(module.parameters(), None) is not None and not isinstance(module, nn.ModuleList)
        module.is_unit = module is net or (owns and module not in inside and pick.random() < 0.7)
    return net.to(rank_device())


def _owned(param):
    return Owned() if param.dim() > 1 else None


def shard(module, door, **kwargs):
    """Make every module inside ``module`` that has ``is_unit`` a unit, the innermost first."""
    for name, child in list(module.named_children()):
        setattr(module, name, shard(child, door, **kwargs))
    if not getattr(module, "is_unit", False):
        return module
    if door in ("fully_shard", "owned"):
        return fully_shard(module, shard_placement_fn=_owned if door == "owned" else None, **kwargs)
    options = {"wrapper": {}, "no_flatten": {"flatten_parameters": False}, "orig_params": {"use_orig_params": True}}
    return FSDP(module, **options[door], **kwargs)


def hits_of(net, *key):
    """The hits of ``net`` for ``key``."""
    pick = random.Random(repr(("hits", key)))
    chance = pick.choice([0.2, 0.5, 0.8])
    return tuple(pick.random() < chance for _ in range(net.num_hits))


def input_of(*key):
    """Normal numbers that depend on ``key`` only."""
    number = random.Random(repr(("input", key))).getrandbits(32)
    values = torch.randn(2, DIM, generator=torch.Generator("cpu").manual_seed(number), device="cpu")
    return values.to(rank_device())


def loss_of(net, key, rank=None):
    """The loss of ``net`` on the batch of ``key`` on ``rank`` (this one by default), and the unused outputs."""
    rank = dist.get_rank() if rank is None else rank
    outputs, unused = net(input_of(key, rank), hits_of(net, key, rank))
    return sum(output.square().mean() for output in outputs), unused


def flat_groups(net):
    """The parameters of ``net`` grouped by flat shard: the trainable parameters of each unit."""
    groups = {}

    def visit(module, unit):
        unit = module if getattr(module, "is_unit", False) else unit
        groups.setdefault(unit, []).extend(p for p in module.parameters(recurse=False) if p.requires_grad)
        for child in module.children():
            visit(child, unit)

    visit(net, net)
    return groups.values()


def whole_state(module):
    """The full state dict of a sharded module. **Collective.**"""
    state = module.state_dict()
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
