"""The private autograd API and what stands in for it give the same gradients."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn.data_parallel import autograd_hooks
from tests.on_ranks import on_ranks


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
    with mock.patch.object(autograd_hooks, "_will_execute", None):
        actual = grads_of(model)
    assert len(expected) == 2
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
    # The used layer comes first on the line: all of it, or its first half, is rank 0's.
    assert all(grad.any() for grad in actual) or dist.get_rank() > 0
