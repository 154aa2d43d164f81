"""A double backward is refused in the first hook of the backward, before anything has changed."""

import pytest
import torch
import torch.distributed as dist

from fairshard.engine.tree import units_below
from fairshard.errors import GradRequiresGradError
from fairshard.nn import TrainingState
from fairshard.utils.collectives import counters, reset_counters
from tests.models import tiny, tiny_batch, tiny_loss, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, sgd

pytestmark = pytest.mark.behaviour("double backward")


def loss_of(model, *key):
    *inputs, targets = tiny_batch(dist.get_rank(), *key)
    return tiny_loss(model(*inputs), targets)


def by_backward(model, loss):
    loss.backward(create_graph=True)


def by_grad_of_the_input(model, loss):
    *inputs, _ = tiny_batch(dist.get_rank(), 0)
    extra = inputs[1].requires_grad_()
    (penalty,) = torch.autograd.grad(model(inputs[0], extra).square().sum(), extra, create_graph=True)
    penalty.square().sum().backward()


@pytest.mark.pairs
@on_ranks(1, 2)
@pytest.mark.parametrize("how", [by_backward, by_grad_of_the_input], ids=lambda how: how.__name__)
@pytest.mark.parametrize("checkpointing", [None, "not_reentrant"])
@pytest.mark.parametrize("accumulates", [False, True])
def test_nothing_has_changed_when_it_is_refused(how, checkpointing, accumulates):
    """Gradients, states and weights are unchanged, nothing was sent, and training continues unharmed."""
    finals = []
    for refused in (False, True):
        model = wrap_tiny(tiny(checkpointing))
        optimizer = sgd(model)
        if accumulates:
            with model.no_sync():
                loss_of(model, "first").backward()
        grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        loss = loss_of(model, 0) if refused and how is by_backward else None
        if refused:
            reset_counters()
            with pytest.raises(GradRequiresGradError, match="create_graph=True"):
                how(model, loss)
            if how is by_backward:
                assert set(counters()) <= {"agreement"}
            assert {unit.state for _, unit in units_below(model)} == {TrainingState.IDLE}
            for name, param in model.named_parameters():
                assert (param.grad is None) if grads[name] is None else torch.equal(param.grad, grads[name])
        for step in range(2):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        finals.append(model.state_dict())
    assert_same_state(*finals)
