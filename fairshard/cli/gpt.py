"""A GPT, byte-level unless told otherwise: the model of ``fairshard train``, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_BYTES = 256


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT: blocks, width, attention heads, the longest sequence, and the number of tokens."""

    layers: int
    dim: int
    heads: int
    context: int
    vocab_size: int = NUM_BYTES


class Attention(nn.Module):
    """Causal self-attention over ``[batch, length, dim]``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix every position with the earlier ones; the shape does not change."""
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return out


class Block(nn.Module):
    """One pre-norm transformer block: attention, then a perceptron four times as wide."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.dim)
        self.mlp = nn.Sequential(
            nn.Linear(config.dim, 4 * config.dim, bias=False),
            nn.GELU(),
            nn.Linear(4 * config.dim, config.dim, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add both branches to the residual stream ``[batch, length, dim]``."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(nn.Module):
    """Predicts the next token at each position: ``[batch, length]`` to logits ``[batch, length, vocab_size]``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.byte_embedding = nn.Embedding(config.vocab_size, config.dim)
        self.position_embedding = nn.Embedding(config.context, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights from torch's default generator; the loss then starts near ln 256 = 5.55 nats."""
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.2.weight")):
                # Each block adds two branches to the residual stream: keep its variance independent of depth.
                nn.init.normal_(parameter, std=0.02 / (2 * self.config.layers) ** 0.5)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for the token after each position, ``length`` at most ``context``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.byte_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
