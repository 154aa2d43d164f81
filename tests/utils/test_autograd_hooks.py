"""What the private autograd API reports; without it gradients are the same."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.utils import autograd as autograd_hooks
from tests.engine.test_unused import Chosen, loss_of_chosen, wrap_all
from tests.on_ranks import on_ranks
from tests.reference import train_alike


class Partly(nn.Module):
    """Uses one of its layers, under a checkpoint if asked; the other gets no gradient."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        if self.use_reentrant is None:
            return self.used(x)
        return checkpoint(self.used, x, use_reentrant=self.use_reentrant)


def everything(_node):
    """Stands in for the private call where torch does not have it."""
    return True


def grads_of(model):
    wrapped = FSDP(nn.Sequential(FSDP(model[0]), FSDP(model[1])))
    wrapped(torch.ones(2, 4, requires_grad=True)).square().sum().backward()
    return [param.grad for param in wrapped.parameters()]


@on_ranks(1, 2)
@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_without_the_private_call_gradients_are_the_same(use_reentrant):
    """Counting every leaf as reached, as on a torch without the call, changes no gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(Partly(use_reentrant), Partly(use_reentrant))
    expected = grads_of(copy.deepcopy(model))
    with mock.patch.object(autograd_hooks, "_will_execute", everything):
        actual = grads_of(model)
    assert len(expected) == 2
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
    # The used layer is first on the line: rank 0 owns all of it, or its first half.
    assert all(grad.any() for grad in actual) or dist.get_rank() > 0


def test_the_accumulate_node_is_the_same_as_long_as_it_is_held():
    """`accumulate_node` returns one node per leaf, so hooks and reachability queries use the same node."""
    leaf = torch.nn.Parameter(torch.ones(2))
    node = autograd_hooks.accumulate_node(leaf)
    assert autograd_hooks.accumulate_node(leaf) is node
    with torch.no_grad():
        assert autograd_hooks.accumulate_node(leaf) is node


def test_outside_of_a_backward_there_is_no_task():
    """The id of the running graph task is `NO_BACKWARD` outside a backward, and differs between backwards."""
    assert autograd_hooks.current_task() == autograd_hooks.NO_BACKWARD
    tasks = []
    for _ in range(2):
        x = torch.ones(1, requires_grad=True)
        x.register_hook(lambda _: tasks.append(autograd_hooks.current_task()))
        (x * 2).backward()
    assert len(set(tasks)) == 2
    assert autograd_hooks.NO_BACKWARD not in tasks


@pytest.mark.parametrize("used", [(), (0,), (0, 2), (0, 1, 2)], ids=str)
def test_reached_is_exact(used):
    """Inside a backward, `reached` names the leaves that it will reach, executed ones included."""
    leaves = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    nodes = [autograd_hooks.accumulate_node(leaf) for leaf in leaves]
    x = torch.ones(2, requires_grad=True)
    loss = x.sum()
    for index in used:
        loss = loss + (leaves[index] * x).sum()
    found = []
    for tensor in (x, *(leaves[index] for index in used)):
        tensor.register_hook(lambda _: found.append(list(autograd_hooks.reached(nodes))))
    loss.backward()
    assert found == [[int(index in used) for index in range(3)]] * (1 + len(used))


@on_ranks(2)
def test_the_public_fallback_copes_with_unused_parameters():
    """A leaf that is never reached only delays its unit until the end of the backward."""
    with mock.patch.object(autograd_hooks, "_will_execute", everything):
        train_alike(Chosen(2), wrap_all, loss_of_chosen, num_steps=4, momentum=0.0)
        train_alike(Chosen(2), FSDP, loss_of_chosen, num_steps=4, momentum=0.0)
