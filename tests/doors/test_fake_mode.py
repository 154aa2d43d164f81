"""Sharded modules under torch's ``FakeTensorMode``."""

import copy

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from fairshard.errors import FairshardError
from tests.doors.fully_shard.models import shard_tiny
from tests.models import loss_of_tiny, tiny, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import train_both


@on_ranks(1)
@pytest.mark.parametrize("shard", [shard_tiny, wrap_tiny])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_fake_forward_is_refused_and_changes_nothing(shard, is_first):
    """A forward under a fake mode raises, at the first call and later; the model then trains as its plain twin."""
    plain = tiny()
    model = shard(copy.deepcopy(plain))
    if not is_first:
        loss_of_tiny(model, (0,)).backward()
        model.zero_grad()
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(FairshardError, match=r"`root`.*FakeTensorMode"):
        model(None, None)
    if shard is wrap_tiny:
        train_both(plain, model, loss_of_tiny, num_steps=2)
    else:
        loss_of_tiny(model, (0,)).backward()
        assert model.embed.weight.grad is not None
