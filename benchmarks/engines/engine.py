"""What a benchmark asks of an engine: the calls that make up a training step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Options:
    """How an adapter builds its engine."""

    bf16: bool = False
    """Compute and reduce in bf16 over fp32 master weights."""
    prefetch: bool = False
    """Use the engine's explicit prefetch settings in place of its defaults."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where the model is and computes."""
    batch: int = 1
    """Sequences per rank and backward, which DeepSpeed must know."""
    accumulate: int = 1
    """Backwards of a step, which DeepSpeed must know."""
    is_offloaded: bool = False
    """Keep shards and optimizer state in host memory."""
    max_norm: float | None = None
    """Clip the norm of all gradients exactly, in every step."""


class Engine:
    """A wrapped model with its optimizer; an adapter overrides what its engine does differently."""

    def __init__(self, model: nn.Module, options: Options, optimizer: torch.optim.Optimizer | None = None):
        self.model = model
        self.optimizer = optimizer or fused_adamw(model)
        self.max_norm = options.max_norm
        self.autocast: AbstractContextManager[object] = nullcontext()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return this rank's loss, taken in fp32 whatever the model computes in."""
        with self.autocast:
            logits = self.model(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Compute gradients; ``is_last`` in a step."""
        loss.backward()

    def step(self) -> None:
        """Clip, if it was asked for, and step."""
        if self.max_norm is not None:
            self.clip(self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clip(self, max_norm: float) -> None:
        """Clip gradients, by the method that wrappers have for it."""
        own = getattr(self.model, "clip_grad_norm_", None)
        own(max_norm) if own else nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def finish(self) -> None:
        """What belongs to a step and is not timed."""


def fused_adamw(model: nn.Module) -> torch.optim.AdamW:
    """Build the optimizer that every engine uses, on whatever parameters the wrapped model shows."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def wrap_children(units: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Replace each child of the container ``units`` by its wrapper."""
    for name, unit in list(units.named_children()):
        setattr(units, name, wrap(unit))
