"""The small model and data that the programs share."""

import zlib

import torch
from torch import nn

DIM, VOCAB = 16, 32


class Block(nn.Module):
    """A residual pair of linear layers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, two blocks and a head."""

    _no_split_modules = ["Block"]

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(seed=1):
    """A new `Net`, the same on every rank."""
    torch.manual_seed(seed)
    return Net()


def tokens(*key, rows=2, length=8):
    """Tokens that depend on ``key`` only."""
    random = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    return torch.randint(VOCAB, (rows, length), generator=random)


def shard_each(fully_shard, model, **options):
    """Shard each block of a `Net`, and then the rest of it."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def next_token_loss(logits, given):
    """Cross entropy of each next token."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), given[:, 1:].flatten())
