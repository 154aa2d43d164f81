"""Calls of a sharded module that cannot work: on two threads at once, and in transforms of ``torch.func``."""

import copy
import threading

import pytest
import torch
from torch import nn

from fairshard.errors import FairshardError, TrainingStateError
from fairshard.nn import fully_shard
from tests.doors.fully_shard.models import shard_tiny
from tests.models import loss_of_tiny, mlp, tiny, wrap_each, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import randn, train_both

SHARDED = [shard_tiny, wrap_tiny]


def shard_each(model):
    """`fully_shard` of the first child, and of the whole."""
    fully_shard(model[0])
    return fully_shard(model)


class Meeting(nn.Module):
    """Waits in its first forward until another thread has tried to call the model."""

    def __init__(self):
        super().__init__()
        self.is_here, self.has_tried = threading.Event(), threading.Event()

    def forward(self, x):
        self.is_here.set()
        assert self.has_tried.wait(20)
        return x


@on_ranks(2)
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_second_thread_is_refused(is_wrapped):
    """A forward on a second thread raises at once, where it would hang or mix up gathers; the first one is right."""
    meeting = Meeting()
    plain = mlp(4, 4)[0]
    model = nn.Sequential(copy.deepcopy(plain), meeting)
    model = wrap_each(model) if is_wrapped else shard_each(model)
    meeting.has_tried.set()
    x = randn(2, 4)
    model(x).sum().backward()
    meeting.is_here.clear()
    meeting.has_tried.clear()
    results = []
    first = threading.Thread(target=lambda: results.append(model(x)))
    first.start()
    assert meeting.is_here.wait(20)
    with pytest.raises(TrainingStateError, match=r"one thread at a time.*`(root|0)` was called on thread MainThread"):
        model(x)
    meeting.has_tried.set()
    first.join()
    assert torch.equal(results[0], plain(x))
    results[0].sum().backward()  # of the first thread's forward, on this one
    model(x).sum().backward()


@on_ranks(1, 2)
@pytest.mark.parametrize("shard", SHARDED)
def test_transforms_of_torch_func_are_refused(shard):
    """A call inside ``torch.func.grad``, ``vmap`` or ``jvp`` raises by name, and the model then trains as before."""
    plain = tiny()
    model = shard(copy.deepcopy(plain))
    x = randn(2, 4)
    for call in (
        lambda: torch.func.grad(lambda x: model(x, x).sum())(x),
        lambda: torch.func.vmap(lambda x: model(x, x))(x),
        lambda: torch.func.jvp(lambda x: model(x, x), (x,), (x,)),
    ):
        with pytest.raises(FairshardError, match=r"transforms of torch\.func.*`root`.*torch\.autograd\.grad"):
            call()
    if shard is wrap_tiny:
        train_both(plain, model, loss_of_tiny, num_steps=2)
    else:
        loss_of_tiny(model, (0,)).backward()
        assert model.embed.weight.grad is not None
