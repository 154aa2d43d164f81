"""Models of a user, for ``--factory``."""

import os

import torch
from torch import nn
from torch.nn import functional as F


class Bytes(nn.Module):
    """Predicts the next byte from the last one, through two layers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 256)

    def forward(self, tokens):
        """Logits ``[rows, length, 256]``."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.head(x)


def own_loss(model, tokens):
    """Twice the cross-entropy of the last byte."""
    return 2 * F.cross_entropy(model(tokens[:, :-1])[:, -1], tokens[:, -1])


def with_loss():
    """A model and a loss of its own."""
    return Bytes(), own_loss


def with_a_loss_for_each_row():
    """A loss that forgets the mean over the rows."""
    return Bytes(), lambda model, tokens: model(tokens).mean((1, 2))


def with_a_number():
    """A loss that is no tensor."""
    return Bytes(), lambda model, tokens: own_loss(model, tokens).item()


def without_the_model():
    """A loss that forgets the model."""
    return Bytes(), lambda model, tokens: tokens.float().mean()


def unlike():
    """Weights that differ from rank to rank."""
    model = Bytes()
    with torch.no_grad():
        model.head.bias += float(os.getpid())
    return model
