"""A model with parameters that are hard to shard, and an optimizer for its plain reference."""

import math

import torch
from torch import nn

from fairshard.utils.ragged_tensor import RaggedShard
from tests.models import DIM, Block, Tiny

KINDS = ["plain", "frozen", "tied", "unused", "empty", "few_rows", "no_dim"]


class Boom(Exception):
    """Raised on purpose by a test."""


class Extra(nn.Module):
    """Parameters of one of `KINDS`; the output depends on those that are used.

    ``raises``: where the next call raises a `Boom`: ``"forward"``, ``"backward"`` or None.
    """

    def __init__(self, kind):
        super().__init__()
        self.raises, self._kind = None, kind
        if kind == "unused":
            self.unused = nn.Linear(DIM, 5)
        if kind == "frozen":
            self.frozen = nn.Parameter(torch.full((DIM,), 1.25), requires_grad=False)
        if kind == "empty":
            self.empty = nn.Parameter(torch.zeros(0, DIM))
        if kind == "few_rows":
            self.row = nn.Parameter(torch.full((1, DIM), 0.5))
            self.rows = nn.Parameter(torch.full((2, DIM), 0.25))
        if kind == "no_dim":
            self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        if self.raises == "forward":
            raise Boom
        if self.raises == "backward" and x.requires_grad:
            x.register_hook(_boom)
        if self._kind == "frozen":
            x = x * self.frozen
        if self._kind == "empty":
            x = x + self.empty.sum(0)
        if self._kind == "few_rows":
            x = x + self.row.sum(0) + self.rows.sum(0)
        if self._kind == "no_dim":
            x = x * self.scale
        return x


def _boom(grad):
    raise Boom


class Part(Block):
    """A `Block` applied after an `Extra`."""

    def __init__(self, kind):
        super().__init__()
        self.extra = Extra(kind)
        if kind == "frozen":
            self.up.requires_grad_(False)

    def forward(self, x):
        return super().forward(self.extra(x))


class Assorted(Tiny):
    """A `Tiny` with parameters of one kind inside and outside both blocks; only kind ``"tied"`` ties weights."""

    def __init__(self, kind, checkpointing=None):
        super().__init__(checkpointing)
        self.first, self.second, self.extra = Part(kind), Part(kind), Extra(kind)
        if kind != "tied":
            self.head.weight = nn.Parameter(self.embed.weight.detach().clone())

    def forward(self, tokens, extra):
        return super().forward(tokens, self.extra(extra))


class ByRows:
    """An optimizer of whole parameters that steps the rows of each of ``num_ranks`` ranks separately, as ranks do.

    A fused kernel rounds an element differently depending on its position in the tensor. ``placed``: the sharded
    parameters, by the whole ones, if their rows are not cut evenly.
    """

    def __init__(self, groups, num_ranks, make, placed=None):
        self._parts, self._placed = {}, placed or {}
        cut = []
        for group in groups:
            parts = [part for param in group["params"] for part in self._cut(param, num_ranks)]
            cut.append({**group, "params": parts})
        self._optimizer = make(cut)

    def _cut(self, param, num_ranks):
        whole = param.detach()
        if not param.dim():
            self._parts[param] = [(..., nn.Parameter(whole))]
        else:
            size = math.ceil(len(param) / num_ranks)
            spans = [slice(rank * size, (rank + 1) * size) for rank in range(num_ranks)]
            placement = self._placed[param].placements[-1] if param in self._placed else None
            if isinstance(placement, RaggedShard):
                spans = [slice(*placement.rows_on(rank, len(param))) for rank in range(num_ranks)]
            self._parts[param] = [(span, nn.Parameter(whole[span])) for span in spans]
        return [part for _, part in self._parts[param]]

    def step(self):
        """Step all rows."""
        for param, parts in self._parts.items():
            for span, part in parts:
                part.grad = None if param.grad is None else param.grad[span]
        self._optimizer.step()

    def zero_grad(self):
        """Drop all gradients."""
        for param in self._parts:
            param.grad = None
