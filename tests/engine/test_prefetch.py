"""A prefetch follows the order of the last pass, and changes no result; its order is in the tests of event orders."""

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn

from fairshard.engine.record import ForwardOrder
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.kit.doors import gathered, whole
from tests.models import loss_of_tiny, mlp, tiny, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn, run_steps

pytestmark = pytest.mark.behaviour("prefetch")


class InOrder(nn.Module):
    """Calls the units that ``order`` names."""

    def __init__(self, wrap=lambda module: module):
        super().__init__()
        self.a, self.b, self.c = (wrap(mlp(4, 4, seed=seed)) for seed in range(3))
        self.order = "abc"

    def forward(self, x):
        for name in self.order:
            x = getattr(self, name)(x)
        return x


@on_ranks(2)
def test_a_changed_order_is_followed():
    """A pass in another order than the last one gives the right result; afterwards nothing stays gathered."""
    plain, wrapped = InOrder(), FSDP(InOrder(FSDP))
    for order in ("abc", "cab", "b", "ba", "abc"):
        plain.order = wrapped.module.order = order
        with torch.no_grad():
            assert torch.equal(wrapped(randn(2, 4)), plain(randn(2, 4))), order
        assert gathered(wrapped) == [], order


@on_ranks(2)
def test_prefetch_changes_no_bit():
    """The same training with every look-ahead switched off gives the same weights."""
    states = []
    for ahead in (True, False):
        model = wrap_tiny(tiny(), **({} if ahead else {"backward_prefetch": None}))
        nothing = mock.patch.object(ForwardOrder, "enter", return_value=None)
        with contextlib.nullcontext() if ahead else nothing:
            run_steps(model, loss_of_tiny)
        states.append(whole(model))
    assert_same_state(*states)
