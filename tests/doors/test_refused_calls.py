"""Calls of a sharded module that cannot work: on two threads at once, in transforms, and under a fake mode."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fairshard.errors import FairshardError, TrainingStateError
from tests.kit.doors import both_apis, shard
from tests.models import loss_of_tiny, mlp, tiny
from tests.on_ranks import on_ranks
from tests.reference import randn, train_both

pytestmark = pytest.mark.behaviour("refused calls")


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
@both_apis
def test_a_second_thread_is_refused(door):
    """A forward on a second thread raises at once, where it would hang or mix up gathers; the first one is right."""
    meeting, x = Meeting(), randn(2, 4)
    plain = mlp(4, 4)[0]
    model = shard(nn.Sequential(copy.deepcopy(plain), meeting), door, "0")
    meeting.has_tried.set()
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


def under_a_fake_mode(model, x):
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(None, None)


TRANSFORMS = r"transforms of torch\.func.*`root`.*torch\.autograd\.grad"
REFUSED = [
    (TRANSFORMS, lambda model, x: torch.func.grad(lambda x: model(x, x).sum())(x)),
    (TRANSFORMS, lambda model, x: torch.func.vmap(lambda x: model(x, x))(x)),
    (TRANSFORMS, lambda model, x: torch.func.jvp(lambda x: model(x, x), (x,), (x,))),
    ("`root`.*FakeTensorMode", under_a_fake_mode),
]


@pytest.mark.pairs
@on_ranks(1, 2)
@both_apis
@pytest.mark.parametrize("has_run", [False, True])
def test_transforms_and_fake_modes_are_refused(door, has_run):
    """A call in ``torch.func.grad``, ``vmap`` or ``jvp``, or under a fake mode, raises; training then is as before."""
    plain = tiny()
    model = shard(copy.deepcopy(plain), door, "first", "second")
    if has_run:
        loss_of_tiny(model, (0,)).backward()
        model.zero_grad()
    for match, call in REFUSED:
        with pytest.raises(FairshardError, match=match):
            call(model, randn(2, 4))
    train_both(plain, model, loss_of_tiny, num_steps=2)
