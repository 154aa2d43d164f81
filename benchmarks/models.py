"""The GPTs that every engine trains, and the random tokens it trains them on.

Input and output embeddings are untied, so that a model's size is easy to check: a block holds ``12 dim^2``
weights and the embeddings ``2 * vocab * dim``; gpt-29m is 25.2 M + 4.2 M, gpt-109m is 100.7 M + 8.4 M.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a model and of one rank's batch."""

    num_blocks: int
    dim: int
    vocab: int
    batch: int
    context: int

    @property
    def num_heads(self) -> int:
        return self.dim // 64


MODELS = {
    "gpt-5m": GPTConfig(num_blocks=4, dim=256, vocab=4096, batch=2, context=128),
    "gpt-29m": GPTConfig(num_blocks=8, dim=512, vocab=4096, batch=2, context=128),
    "gpt-109m": GPTConfig(num_blocks=8, dim=1024, vocab=4096, batch=1, context=64),
    "gpt-1.3b": GPTConfig(num_blocks=24, dim=2048, vocab=50304, batch=8, context=1024),
}


class Block(nn.Module):
    """A pre-norm transformer block: the unit of sharding."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.attention_norm = nn.LayerNorm(config.dim)
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.projection = nn.Linear(config.dim, config.dim)
        self.mlp_norm = nn.LayerNorm(config.dim)
        self.up = nn.Linear(config.dim, 4 * config.dim)
        self.down = nn.Linear(4 * config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        # [batch, context, 3 * dim] -> three of [batch, num_heads, context, dim / num_heads]
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """A decoder-only transformer that returns logits ``[batch, context, vocab]``."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.dim)
        self.positions = nn.Embedding(config.context, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_blocks))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_gpt(config: GPTConfig) -> GPT:
    """Build the model with the same weights on every rank and for every engine."""
    torch.manual_seed(0)
    return GPT(config)


def checkpoint_blocks(gpt: GPT) -> None:
    """Keep no activations of the blocks: the backward computes each again."""
    for block in gpt.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def random_batches(config: GPTConfig, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``(tokens, targets)``, each ``[batch, context]``: different data per rank, the same for all engines."""
    generator = torch.Generator().manual_seed(1000 + rank)
    while True:
        text = torch.randint(config.vocab, (config.batch, config.context + 1), generator=generator)
        yield text[:, :-1], text[:, 1:]
