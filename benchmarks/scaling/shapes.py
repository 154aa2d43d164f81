"""Models to plan: GPTs and Llama-style models of published sizes, built on the meta device, and their arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import models
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama-style model; with ``num_experts``, ``num_active`` of them compute each token."""

    num_blocks: int
    dim: int
    num_heads: int
    num_kv_heads: int
    hidden: int
    vocab: int
    head_dim: int = 128
    num_experts: int = 0
    num_active: int = 0


class Experts(nn.Module):
    """Stacked SwiGLU experts ``[num_experts, ...]``; every expert computes every token, and the router weighs them."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.router = nn.Linear(config.dim, config.num_experts, bias=False)
        self.gate = nn.Parameter(torch.randn(config.num_experts, config.dim, config.hidden) * 0.02)
        self.up = nn.Parameter(torch.randn(config.num_experts, config.dim, config.hidden) * 0.02)
        self.down = nn.Parameter(torch.randn(config.num_experts, config.hidden, config.dim) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        hidden = F.silu(torch.einsum("btd,edh->bteh", x, self.gate)) * torch.einsum("btd,edh->bteh", x, self.up)
        return torch.einsum("bteh,ehd,bte->btd", hidden, self.down, weights)


class SwiGLU(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    """A pre-norm block with grouped queries: the unit of sharding. Positions are left out: they have no parameters."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.attention_norm = nn.RMSNorm(config.dim)
        self.q = nn.Linear(config.dim, config.num_heads * config.head_dim, bias=False)
        self.k = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.v = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.o = nn.Linear(config.num_heads * config.head_dim, config.dim, bias=False)
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.mlp = Experts(config) if config.num_experts else SwiGLU(config)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (
            each(normed).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.num_blocks))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Shape:
    """A model with the batch of one rank: ``batch`` sequences of ``context`` tokens.

    ``fused``: attention that keeps no scores in memory (FlashAttention) and skips masked blocks; otherwise the scores
    ``[batch, heads, context, context]`` are written and read, and all of them are computed.
    """

    name: str
    config: LlamaConfig | models.GPTConfig
    num_heads: int
    head_dim: int
    batch: int
    context: int
    fused: bool = True

    @property
    def block(self) -> type[nn.Module]:
        """The class of the modules that become units."""
        return LlamaBlock if isinstance(self.config, LlamaConfig) else models.Block

    @property
    def dim(self) -> int:
        return self.config.dim

    @property
    def num_blocks(self) -> int:
        return self.config.num_blocks

    @property
    def num_tokens(self) -> int:
        """Tokens of one rank in one step."""
        return self.batch * self.context

    def build(self) -> nn.Module:
        """The model on the meta device: no memory."""
        return _build(self.config)

    def block_flops(self) -> int:
        """Floating-point operations of one block's forward over a rank's tokens: products and attention."""
        return 2 * self.num_tokens * self._active(self._blocks()[0]) + self.attention_flops()

    def head_flops(self) -> int:
        """The same for the output layer."""
        return 2 * self.num_tokens * self.dim * self.config.vocab

    def flops(self, recomputes: bool = False) -> int:
        """Operations of one step of one rank: a backward is two forwards; with ``recomputes`` blocks run once more."""
        blocks = self.num_blocks * self.block_flops()
        return (4 if recomputes else 3) * blocks + 3 * self.head_flops()

    def scores_numel(self) -> int:
        """Elements of the attention scores of one block that memory holds."""
        return 0 if self.fused else self.batch * self.num_heads * self.context**2

    def activation_nbytes(self) -> int:
        """16-bit activations with every block checkpointed: inputs of blocks, one block's values, the logits.

        A block keeps 34 bytes for each token and element of the width, and 5 for each score (Korthikanti et al., 2022,
        section 4.1); logits are kept in 16 bits, and in 32 bits twice for the loss.
        """
        inputs = 2 * self.num_blocks * self.num_tokens * self.dim
        inside = 34 * self.num_tokens * self.dim + 5 * self.scores_numel()
        return inputs + max(inside, 10 * self.num_tokens * self.config.vocab)

    def attention_flops(self) -> int:
        whole = 4 * self.num_tokens * self.context * self.num_heads * self.head_dim
        return whole // 2 if self.fused else whole

    def _blocks(self) -> list[nn.Module]:
        return [module for module in self.build().modules() if isinstance(module, self.block)]

    def _active(self, block: nn.Module) -> int:
        """Weights of ``block`` that multiply one token."""
        active = 0
        for weight in block.parameters():
            if weight.dim() == 3:  # stacked experts
                assert isinstance(self.config, LlamaConfig)
                active += weight.numel() * self.config.num_active // self.config.num_experts
            elif weight.dim() == 2:
                active += weight.numel()
        return active


@cache
def _build(config: LlamaConfig | models.GPTConfig) -> nn.Module:
    with torch.device("meta"):
        return Llama(config) if isinstance(config, LlamaConfig) else models.GPT(config)


def gpt(name: str, num_blocks: int, dim: int, num_heads: int, batch: int = 2, context: int = 2048) -> Shape:
    """A GPT with a vocabulary of 50,000, embeddings of input and output apart, and attention without fusion."""
    config = models.GPTConfig(num_blocks, dim, vocab=50_000, batch=batch, context=context)
    return Shape(name, config, num_heads, dim // num_heads, batch, context, fused=False)


def llama(name: str, config: LlamaConfig, batch: int = 1, context: int = 8192) -> Shape:
    """A Llama-style model with fused attention."""
    return Shape(name, config, config.num_heads, config.head_dim, batch, context)


SHAPES: dict[str, Callable[[], Shape]] = {
    "GPT 7B": lambda: gpt("GPT 7B", 32, 4096, 32),
    "GPT 13B": lambda: gpt("GPT 13B", 40, 5120, 40),
    "GPT 30B": lambda: gpt("GPT 30B", 48, 7168, 56),
    "Llama 70B": lambda: llama("Llama 70B", LlamaConfig(80, 8192, 64, 8, 28672, 128_256)),
    "GPT 175B": lambda: gpt("GPT 175B", 96, 12288, 96),
    "Llama 405B": lambda: llama("Llama 405B", LlamaConfig(126, 16384, 128, 8, 53248, 128_256), context=4096),
    "MoE 235B": lambda: llama("MoE 235B", LlamaConfig(94, 4096, 64, 4, 1536, 151_936, num_experts=128, num_active=8)),
}
"""GPT: sizes of Brown et al. (2020) and, 30B, of OPT (Zhang et al., 2022). Llama: Llama 3 (Dubey et al., 2024). MoE:
Qwen3-235B-A22B (2025), 128 experts of which 8 compute a token."""
