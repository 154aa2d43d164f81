"""Ways to copy a model, and the training that shows whether the copy is right."""

import io
import pickle

import torch

from tests.models import loss_of_tiny
from tests.reference import run_steps


def by_pickle(model):
    """Copy ``model`` through a pickle."""
    return pickle.loads(pickle.dumps(model))


def by_torch_save(model):
    """Copy ``model`` by saving and loading it."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def losses_of(model, num_steps=2):
    """The losses of a few steps of a `Tiny` with a new optimizer."""
    return run_steps(model, loss_of_tiny, num_steps)
