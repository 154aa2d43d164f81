"""Autograd's thread for a device may let go of a graph task only after ``backward()`` has returned."""

import contextlib
import threading

import pytest
import torch
from torch import nn

from fairshard.engine.tree import units_below
from fairshard.errors import PartialGradientError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import fully_shard
from tests.models import mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import randn, sgd

pytestmark = pytest.mark.behaviour("late ends of backwards")


def run_backward(model, fails=False):
    """Run a backward; returns a list that keeps its graph task alive, as autograd's thread may."""
    _, unit = next(iter(units_below(model)))
    kept = []

    def keep(_module, _grads):
        kept.append(unit.root.engine.backward.task())
        if fails:
            raise InterruptedError

    first = (model.module if isinstance(model, FSDP) else model)[0]
    handle = first.register_full_backward_pre_hook(keep)
    output = model(randn(3, 4, key=(0,)))
    with contextlib.suppress(InterruptedError):
        output.square().sum().backward()
    handle.remove()
    assert kept[0] is not None
    return kept


@on_ranks(2)
def test_a_task_that_ends_late_hides_nothing_of_the_next_pass():
    """Parameters that `unshard` has gathered after the backward stay whole when the old task ends."""
    model = mlp(4, 9, 5)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    task = run_backward(model)
    model[0].unshard()
    task.clear()
    assert [tuple(param.shape) for param in model[0].parameters()] == [(9, 4), (9,)]
    assert all(type(param) is nn.Parameter for param in model[0].parameters())


@on_ranks(2)
def test_zero_grad_after_an_exception_zeroes_shards():
    """After a backward that raised, even if its task is still alive, `zero_grad` drops gradients of shards."""
    model = wrap_each(mlp(4, 9, 5))
    model(randn(3, 4, key=(0,))).square().sum().backward()
    shards = list(model.parameters())
    task = run_backward(model, fails=True)
    model.zero_grad()
    assert all(shard.grad is None for shard in shards)
    assert all(one is other for one, other in zip(model.parameters(), shards, strict=True))
    task.clear()


@on_ranks(2)
def test_a_step_after_an_exception_cleans_up():
    """A step after a backward that raised drops that backward first, even if its task is still alive."""
    model = wrap_each(mlp(4, 9, 5))
    optimizer = sgd(model)
    task = run_backward(model, fails=True)
    with contextlib.suppress(PartialGradientError):
        optimizer.step()
    _, unit = next(iter(units_below(model)))
    assert unit.root.engine.backward is None
    task.clear()


@on_ranks(2)
def test_a_forward_after_an_exception_begins_a_pass():
    """A forward is no recomputation of a backward that has raised, even if its task is still alive."""
    model, expected = wrap_each(mlp(4, 9, 5)), wrap_each(mlp(4, 9, 5))
    task = run_backward(model, fails=True)
    for each in (model, expected):
        optimizer = sgd(each)
        optimizer.zero_grad()
        each(randn(3, 4, key=(1,))).square().sum().backward()
        optimizer.step()
    task.clear()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@on_ranks(2)
def test_a_step_on_another_thread_leaves_a_running_backward_alone():
    """A second optimizer steps on a thread of its own, in the middle of a backward; the backward goes on."""
    model, expected = wrap_each(mlp(4, 9, 5)), wrap_each(mlp(4, 9, 5))
    other = nn.Parameter(torch.ones(1))
    other.grad = torch.ones(1)

    def step_elsewhere(_module, _grads):
        thread = threading.Thread(target=torch.optim.SGD([other], lr=0.1).step)
        thread.start()
        thread.join()

    model.module[0].register_full_backward_pre_hook(step_elsewhere)
    for each in (model, expected):
        each(randn(3, 4, key=(1,))).square().sum().backward()
    assert other.item() < 1
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
