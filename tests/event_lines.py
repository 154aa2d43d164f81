"""Event orders as short lines, and the models that the event-order tests of both APIs use.

A line has ``+unit`` where a gather is issued, ``-unit`` where a unit is freed and ``!unit`` where its gradients are in
their bucket. Layers are written as their number; the names of one event are joined by ``&``.
"""

import contextlib

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairshard.nn import Phase, observe
from tests.models import DIM, VOCAB

CHECKPOINTED = "_checkpoint_wrapped_module"
_SIGNS = {"unshard": "+", "reshard": "-", "post_backward": "!"}


class Stack(nn.Module):
    """An embedding, layers one after the other, and a Linear that gives the outputs.

    ``recomputes``: each layer is called in a checkpoint of its own.
    """

    def __init__(self, layers, recomputes=False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(DIM, VOCAB)
        self._recomputes = recomputes

    def forward(self, tokens):
        return self.head(self.run_layers(self.embed(tokens)))

    def run_layers(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self._recomputes else layer(x)
        return x


class Branches(nn.Module):
    """Two Linears of the same input; both outputs are returned."""

    def __init__(self):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        return self.lin1(x), self.lin2(x)


class Expert(nn.Module):
    """Two Linears, of which ``w1`` is made a unit."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        return self.w2(torch.relu(self.w1(x)))


class ExpertBlock(nn.Module):
    """A residual block around an `Expert`."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.expert = Expert()

    def forward(self, x):
        return x + self.expert(self.norm(x))


def tokens():
    """Input of a `Stack`."""
    return torch.zeros(2, 5, dtype=torch.long)


@contextlib.contextmanager
def order(model, expected):
    """Check that events inside the context come in the ``expected`` order, each with the right phase."""
    events = []
    with observe(model, events.append):
        yield
    events = [event for event in events if event.event in _SIGNS]
    found = " ".join(_SIGNS[event.event] + short(event.fqn) for event in events)
    assert found == expected, f"found    {found}\nexpected {expected}"
    in_backward = "!" in expected
    for event in events:
        before = Phase.PRE_BACKWARD if event.event == "unshard" else Phase.POST_BACKWARD
        assert event.phase is (before if in_backward else Phase.FORWARD), event


def short(fqn):
    """The unit's name without the ``layers.`` prefix and without checkpoint wrappers."""
    assert "module" not in fqn.replace(CHECKPOINTED, "")
    names = [name.replace(f".{CHECKPOINTED}", "").removeprefix("layers.") for name in fqn.split(", ")]
    return "&".join(names) or "root"


def without_unshards(line):
    """``line`` without its gathers: a backward that finds everything gathered."""
    return " ".join(word for word in line.split() if not word.startswith("+"))
