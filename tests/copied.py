"""Ways to copy a model, and the training that shows whether the copy is right."""

import io
import pickle

import torch
import torch.distributed as dist

from tests.models import tiny_batch, tiny_loss
from tests.reference import sgd


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
    """The losses of a few steps with a new optimizer."""
    optimizer, losses = sgd(model), []
    for step in range(num_steps):
        *inputs, targets = tiny_batch(dist.get_rank(), step)
        loss = tiny_loss(model(*inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
