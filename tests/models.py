"""Small models that are hard to shard: uneven sizes, tied weights, modules that run twice."""

import itertools
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairshard.nn import FullyShardedDataParallel
from tests.kit import rank_device

VOCAB, DIM, HIDDEN = 13, 6, 11


class Block(nn.Module):
    """A residual block: LayerNorm and two Linears whose sizes no world size above 1 divides."""

    def __init__(self, dim=DIM, hidden=HIDDEN):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tiny(nn.Module):
    """Embedding tied to the output layer, two blocks, and between them a Linear that is called twice.

    ``checkpointing`` is None, ``"reentrant"`` or ``"not_reentrant"``: it changes what is recomputed, never the result.
    """

    def __init__(self, checkpointing=None):
        super().__init__()
        self.checkpointing = checkpointing
        self.embed = nn.Embedding(VOCAB, DIM)
        self.first = Block()
        self.shared = nn.Linear(DIM, DIM)
        self.second = Block()
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB)
        self.head.weight = self.embed.weight

    def forward(self, tokens, extra):
        x = self.embed(tokens) + extra
        x = self._run(self.first, x)
        x = torch.tanh(self.shared(x))
        x = self._run(self.second, x)
        x = self.shared(x)
        return self.head(self.norm(x))

    def _run(self, block, x):
        if self.checkpointing is None:
            return block(x)
        return checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")


class SavedTransposed:
    """Mixin of a module that saves and loads its ``weight`` in its own way."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "transposed"] = destination.pop(prefix + "weight").t().contiguous()

    def _load_from_state_dict(self, state_dict, prefix, *args):
        state_dict[prefix + "weight"] = state_dict.pop(prefix + "transposed").t()
        super()._load_from_state_dict(state_dict, prefix, *args)


def tiny(checkpointing=None, seed=1):
    """A `Tiny` on this rank's device, the same on every rank."""
    torch.manual_seed(seed)
    return Tiny(checkpointing).to(rank_device())


def wrap_tiny(model, **kwargs):
    """Wrap units inside units: a Linear of the first block, both blocks, the shared Linear, and the whole."""
    model.first.up = FullyShardedDataParallel(model.first.up, **kwargs)
    model.first = FullyShardedDataParallel(model.first, **kwargs)
    model.second = FullyShardedDataParallel(model.second, **kwargs)
    model.shared = FullyShardedDataParallel(model.shared, **kwargs)
    return FullyShardedDataParallel(model, **kwargs)


def tiny_batch(*key):
    """Tokens, extra input and targets that depend on ``key`` (rank, step, ...) only."""
    random = torch.Generator("cpu").manual_seed(zlib.crc32(repr(key).encode()))
    tokens = torch.randint(VOCAB, (2, 5), generator=random, device="cpu")
    extra = torch.randn(2, 5, DIM, generator=random, device="cpu")
    targets = torch.randint(VOCAB, (2, 5), generator=random, device="cpu")
    return tokens.to(rank_device()), extra.to(rank_device()), targets.to(rank_device())


def tiny_loss(logits, targets):
    """Cross entropy in fp32, whatever the logits' dtype."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def loss_of_tiny(model, key):
    """One forward on this rank's batch of ``key``."""
    *inputs, targets = tiny_batch(dist.get_rank(), *key)
    return tiny_loss(model(*inputs), targets)


def mlp(*widths, seed=1):
    """Linears with tanh between them, on this rank's device, the same on every rank."""
    torch.manual_seed(seed)
    layers = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(rank_device())


def wrap_each(model, **kwargs):
    """Make every Linear of a Sequential a unit, and the Sequential itself another."""
    for index, layer in enumerate(model):
        if isinstance(layer, nn.Linear):
            model[index] = FullyShardedDataParallel(layer, **kwargs)
    return FullyShardedDataParallel(model, **kwargs)
