"""Train a sharded model and its plain twin side by side."""

import torch

from tests.reference import average_grads_, randn, sgd


def squares(net, step):
    """A loss on inputs that differ by rank and step, but not by net."""
    return net(randn(3, 4, key=step).requires_grad_()).square().sum()


def train_beside(model, plain, loss_of=squares, num_steps=3, before=lambda model: None):
    """Train both on ``loss_of(net, step)`` and compare losses and values; ``before(model)`` runs before each step."""
    optimizers = sgd(model), sgd(plain)
    for step in range(num_steps):
        before(model)
        losses = [loss_of(net, step) for net in (model, plain)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        average_grads_(plain.parameters(), keeps_none=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.named_parameters():
        assert torch.equal(value.full_tensor(), plain.get_parameter(name)), name
