"""The pool of ranks: what a test may rely on."""

import gc
import os
import signal
import threading
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate

from fairshard.nn import fully_shard
from tests.kit import RankPool, RanksFailed, delayed, rank_call, rank_device, rank_pool, run_ranks
from tests.on_ranks import on_ranks

pytestmark = pytest.mark.cpu_only("its pool has ranks of the CPU")


@pytest.fixture(scope="module")
def pool():
    """A pool for this module only, because its tests kill workers."""
    pool = RankPool()
    yield pool
    pool.close()


def _rank_and_size(offset):
    return dist.get_rank() + offset, dist.get_world_size(), os.getpid()


def test_results_come_back_in_rank_order():
    """Every rank runs the function once, and results are in rank order."""
    for world_size in (1, 2, 3):
        results = run_ranks(world_size, _rank_and_size, 10)
        assert [result[:2] for result in results] == [(10 + rank, world_size) for rank in range(world_size)]


def test_workers_are_kept():
    """Calls of any world size run in the same processes: torch is imported once per worker."""
    first = run_ranks(2, _rank_and_size, 0)
    assert run_ranks(2, _rank_and_size, 0) == first
    assert run_ranks(1, _rank_and_size, 0)[0][2] == first[0][2]


@on_ranks(1, 2, 3)
def test_ranks_can_talk():
    """The default group is there and connects all ranks."""
    total = torch.ones(3, device=rank_device())
    dist.all_reduce(total)
    assert total.tolist() == [dist.get_world_size()] * 3


_groups = []


def _use_dtensors():
    """Fill the caches of DTensor; returns whether each earlier call's group has ended."""
    gc.collect()
    have_ended = [group() is None for group in _groups]
    _groups.append(weakref.ref(dist.group.WORLD))
    model = fully_shard(torch.nn.Linear(4, 4, device=rank_device()))
    model(torch.ones(2, 4, device=rank_device())).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    (model.weight.detach() + 1).redistribute(placements=[Replicate()])
    return have_ended


def test_groups_end_with_their_calls(pool):
    """Each group has threads that poll: no cache of DTensor keeps it."""
    for num_earlier in range(3):
        assert pool.run(2, _use_dtensors) == [[True] * num_earlier] * 2


def _draw():
    return torch.rand(3).tolist(), torch.get_num_threads()


def test_ranks_are_deterministic():
    """One thread and the same seed on every rank, in every call."""
    assert len({str(result) for _ in range(2) for result in run_ranks(2, _draw)}) == 1
    assert run_ranks(1, _draw)[0][1] == 1


def _raise_on(rank):
    if dist.get_rank() in (rank, 5):
        raise KeyError(f"from rank {dist.get_rank()}")
    print("I was fine")


def test_an_exception_comes_back_with_rank_and_traceback():
    """The rank that raised is named, with its traceback; the others are not."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, _raise_on, 1)
    assert list(caught.value.failures) == [1]
    assert "KeyError: 'from rank 1'" in str(caught.value)
    assert "in _raise_on" in str(caught.value)


def _hang_on(rank):
    print("before the hang")
    if dist.get_rank() == rank:
        _sleep_for_ever()
    return dist.get_rank()


def _sleep_for_ever():
    threading.Event().wait()


def test_a_hung_rank_is_reported_with_its_stack_and_replaced(pool):
    """A call ends at its timeout, names the ranks that hang and where, and the next call works."""
    before = pool.run(2, _rank_and_size, 0)
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        pool.run(2, _hang_on, 0, timeout=3.0)
    assert time.monotonic() - start < 20
    assert list(caught.value.failures) == [0]
    assert "hung for 3.0 s" in str(caught.value)
    assert "_sleep_for_ever" in str(caught.value)
    assert "before the hang" in str(caught.value)
    after = pool.run(2, _rank_and_size, 0)
    assert before[0][2] != after[0][2]


def _wait_for_a_peer_that_raised():
    if dist.get_rank() == 0:
        raise ValueError("rank 0 leaves")
    dist.barrier()


def test_a_rank_that_waits_for_one_that_failed_is_reported(pool):
    """When one rank raises and another waits for it, both are named, by traceback or stack."""
    with mock.patch.object(rank_pool, "_GRACE_S", 0.5), pytest.raises(RanksFailed) as caught:
        pool.run(2, _wait_for_a_peer_that_raised)
    assert "rank 0 leaves" in caught.value.failures[0]
    assert "_wait_for_a_peer_that_raised" in caught.value.failures[1]
    assert [result[0] for result in pool.run(2, _rank_and_size, 0)] == [0, 1]


def _die():
    os.kill(os.getpid(), signal.SIGSEGV)


def test_a_rank_that_dies_is_reported_and_replaced(pool):
    """A crash of the process is a failure of the call, with the exit code and faulthandler's stack."""
    with pytest.raises(RanksFailed, match=f"died with exit code -{signal.SIGSEGV.value}") as caught:
        pool.run(1, _die)
    assert "_die" in str(caught.value)
    assert pool.run(1, _rank_and_size, 0)[0][:2] == (0, 1)


def test_results_that_cannot_be_pickled_are_an_error(pool):
    """A result that cannot be pickled is reported as a failure of its rank, not as a hang."""
    with pytest.raises(RanksFailed, match="pickle"):
        pool.run(1, threading.Lock)


def _delayed_barrier():
    store = dist.distributed_c10d._get_default_store()
    with delayed(dist, "barrier", rank=1, delay=lambda: store.wait(["go"])):
        work = dist.barrier(async_op=True)
        completed_early = work.is_completed()
        store.set("go", "")
        work.wait()
    with delayed(dist, "barrier", rank=0, delay=0.01):
        dist.barrier()
    dist.barrier()
    return completed_early


def test_delay_makes_the_others_wait():
    """`delayed` holds one rank back, ranks that need it wait, and nothing is late afterwards."""
    assert run_ranks(2, _delayed_barrier)[0] is False


def _delay_of_nothing():
    with pytest.raises(AssertionError, match="barrier must be called on rank 0"), delayed(dist, "barrier", 0, 0.0):
        pass


def test_a_delay_that_delays_nothing_is_an_error():
    """`delayed` raises if its function is never called, because such a test would pass whatever the engine does."""
    run_ranks(1, _delay_of_nothing)


def test_ranks_that_never_talk_do_not_disturb_each_other():
    """A rank that finishes early keeps its group until all have finished, because others may still connect to it."""
    for number in range(20):
        results = run_ranks(3, _rank_and_size, number)
        assert [result[0] for result in results] == [number, number + 1, number + 2]


@pytest.mark.parametrize(
    ("rank", "index", "host"), [(0, 0, None), (1, 1, None), (2, 0, "fairshard-1"), (5, 1, "fairshard-2")]
)
def test_ranks_that_share_a_device_say_that_they_are_on_other_hosts(monkeypatch, rank, index, host):
    """Six ranks on two devices: NCCL sees three hosts, each with both devices."""
    taken = []
    monkeypatch.setattr(rank_call, "device_count", lambda kind: 2)
    monkeypatch.setattr(rank_call, "set_device", taken.append)
    monkeypatch.setattr(os, "environ", {})
    rank_call.take_device("cuda", rank)
    assert taken == [torch.device("cuda", index)]
    assert os.environ.get("NCCL_HOSTID") == host
