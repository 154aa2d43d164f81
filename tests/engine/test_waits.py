"""Every wait is needed: with it a late rank changes nothing, without it the result is wrong.

Each test delays rank 1 and checks rank 0. Its twin runs the same code with one kind of wait patched out.
"""

import contextlib
import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.utils import buckets
from fairshard.utils.collectives import Communicator, RowGather
from fairshard.utils.transfers import Transfer
from tests.kit import delayed
from tests.models import mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import average_grads_, randn, sgd

pytestmark = [
    pytest.mark.behaviour("waits"),
    pytest.mark.cpu_only("on a device the host does not wait: the simulator finds missing waits"),
]

LATE_S = 0.1


def late(owner, name, twin):
    """Start ``owner.name`` late on rank 1: after `LATE_S`, or in a twin only once rank 0 has called `done`."""
    return delayed(owner, name, rank=1, delay=(lambda: store().wait(["done"])) if twin else LATE_S)


def done():
    """Tell rank 1 that rank 0 has read the result that it did not wait for."""
    if dist.get_rank() == 0:
        store().set("done", "")


def store():
    return dist.distributed_c10d._get_default_store()


def kind_of(transfer):
    """The kind of a transfer, derived from the result it will return."""
    if transfer._finish is not None:
        return "reduce_scatter"
    return "all_gather" if transfer.result is not None and transfer.result.dim() == 2 else "all_reduce"


@contextlib.contextmanager
def without_wait(kind):
    """Treat transfers of ``kind`` as finished immediately; wait for them when the context ends.

    The memory they write to is kept until then, and buckets are not freed: the twin must be wrong, not crash.
    """
    parked = []
    original = Transfer.wait

    def wait(transfer):
        if kind is not None and transfer.works and kind_of(transfer) == kind:
            parked.append((transfer.works, transfer.result, transfer._finish))
            transfer.works = ()
        return original(transfer)

    keep_memory = mock.patch.object(buckets, "free_storage_", mock.Mock())
    with mock.patch.object(Transfer, "wait", wait), keep_memory if kind else contextlib.nullcontext():
        yield
        for works, _, _ in parked:
            for work in works:
                work.wait()


def assert_right_unless(twin, actual, expected):
    """In the ``twin`` the result is wrong on rank 0, which did not wait; otherwise it is right on all ranks."""
    if not twin:
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    elif dist.get_rank() == 0:
        assert not torch.equal(actual, expected), "the wait that was taken away is not needed"


def two_steps(seed):
    """A plain model and its wrapped copy, after one backward; a step of both changes the weights last gathered.

    Each test needs its own ``seed``: memory freed by another test may still hold its values, and a twin that does not
    wait would find them right.
    """
    model = mlp(4, 5, seed=seed)
    plain = copy.deepcopy(model)
    wrapped = FSDP(model, order_check="off")  # the check would wait for the other ranks
    for one in (plain, wrapped):
        one(randn(3, 4)).sum().backward()
    average_grads_(plain.parameters())
    return plain, wrapped


@on_ranks(2)
@pytest.mark.parametrize("twin", [False, True])
def test_forward_waits_for_a_late_all_gather(twin):
    """Rank 1 sends its shard late; rank 0 still computes with it."""
    plain, wrapped = two_steps(seed=2 + twin)
    sgd(plain).step()
    sgd(wrapped).step()
    with late(RowGather, "start", twin), without_wait("all_gather" if twin else None):
        actual = wrapped(randn(3, 4, key=1)).detach().clone()
        done()
    assert_right_unless(twin, actual, plain(randn(3, 4, key=1)))


@on_ranks(2)
@pytest.mark.parametrize("twin", [False, True])
def test_forward_waits_for_a_late_optimizer(twin):
    """Rank 1 steps its shard late; rank 0 computes with the weights after that step."""
    plain, wrapped = two_steps(seed=4 + twin)
    sgd(plain).step()
    optimizer = sgd(wrapped)
    with late(optimizer, "step", twin), without_wait("all_gather" if twin else None):
        optimizer.step()
        actual = wrapped(randn(3, 4, key=1)).detach().clone()
        done()
    assert_right_unless(twin, actual, plain(randn(3, 4, key=1)))


@on_ranks(2)
@pytest.mark.parametrize("twin", [False, True])
def test_step_waits_for_a_late_reduce_scatter(twin):
    """Rank 1 sends its gradients late; after the backward rank 0 has their mean."""
    plain, wrapped = two_steps(seed=6 + twin)
    for one in (plain, wrapped):
        one.zero_grad()
    plain(randn(3, 4, key=1)).sum().backward()
    average_grads_(plain.parameters())
    loss = wrapped(randn(3, 4, key=1)).sum()
    with late(Communicator, "reduce_scatter", twin), without_wait("reduce_scatter" if twin else None):
        loss.backward()
        actual = wrapped.params[0].grad.clone()
        done()
    line = torch.cat([param.grad.flatten() for param in plain.parameters()])
    line = torch.nn.functional.pad(line, (0, 2 * actual.numel() - line.numel()))
    assert_right_unless(twin, actual, line.chunk(2)[dist.get_rank()])


@on_ranks(2)
@pytest.mark.parametrize("twin", [False, True])
def test_clip_waits_for_a_late_all_reduce(twin):
    """Rank 1 sends its part of the norm late; rank 0 returns the norm of all parts."""
    plain, wrapped = two_steps(seed=8 + twin)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9, float("inf"))
    with late(Communicator, "all_reduce", twin), without_wait("all_reduce" if twin else None):
        wrapped.params[0].grad.mul_(dist.get_rank())  # so that rank 0's own part is not the largest
        norm = wrapped.clip_grad_norm_(1e9, float("inf")).clone()
        done()
        own = wrapped.params[0].grad.abs().max()
    expected = own.clone()
    dist.all_reduce(expected, dist.ReduceOp.MAX)
    assert_right_unless(twin, norm, expected)


@on_ranks(2)
@pytest.mark.parametrize(("owner", "name"), [(RowGather, "start"), (Communicator, "reduce_scatter")])
@pytest.mark.parametrize("rank", [0, 1])
def test_training_with_a_late_rank_keeps_every_bit(owner, name, rank):
    """Whole steps over several units and buckets, with one rank late in each collective: nothing changes."""
    states = []
    for seconds in (0.0, 0.02):
        model = wrap_each(mlp(4, 9, 7, 5), bucket_cap_mb=0)
        optimizer = sgd(model)
        with delayed(owner, name, rank=rank, delay=seconds):
            for step in range(3):
                model(randn(3, 4, key=step)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        states.append(model.state_dict())
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
