"""The simulator's backend of torch.distributed: results, order, waits, futures."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from tests import sim
from tests.on_ranks import Body
from tests.sim.outcome import filled, races_taken
from tests.sim.ranks import on_sim, pool

SEEDS = (None, 0, 1, 3)


def of(*values):
    return torch.tensor(values, dtype=torch.float32, device="sim")


@pytest.mark.parametrize("seed", SEEDS)
@on_sim(2)
def test_collectives_give_what_torch_says(seed):
    """Each collective gives its defined result on every rank, in any order of work."""
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    base = 10.0 * rank
    own, gathered = of(base, base + 1), torch.empty(4, device="sim")
    dist.all_gather_into_tensor(gathered, own)
    assert gathered.tolist() == [0, 1, 10, 11]
    parts = [torch.empty(2, device="sim") for _ in range(2)]
    dist.all_gather(parts, own)
    assert [part.tolist() for part in parts] == [[0, 1], [10, 11]]
    total = own.clone()
    dist.all_reduce(total)
    assert total.tolist() == [10, 12]
    dist.all_reduce(total, op=dist.ReduceOp.MAX)
    assert total.tolist() == [10, 12]
    to_root = own.clone()
    dist.reduce(to_root, 1)
    assert to_root.tolist() == ([10, 12] if rank == 1 else own.tolist())
    sent = own.clone()
    dist.broadcast(sent, 1)
    assert sent.tolist() == [10, 11]
    part = torch.empty(1, device="sim")
    dist.reduce_scatter_tensor(part, own, op=dist.ReduceOp.AVG)
    assert part.item() == 5 + rank
    dist.reduce_scatter(part, [of(base), of(base + 1)])
    assert part.item() == 10 + 2 * rank
    exchanged = torch.empty(2, device="sim")
    dist.all_to_all_single(exchanged, own)
    assert exchanged.tolist() == [rank, 10 + rank]
    lists = [torch.empty(1, device="sim"), torch.empty(2, device="sim")]
    dist.all_to_all(lists, [torch.full((rank + 1,), base + i, device="sim") for i in range(2)])
    assert [t.tolist() for t in lists] == [[rank], [10 + rank] * 2]
    dist.scatter(part, [of(7), of(8)] if rank == 0 else None, src=0)
    assert part.item() == 7 + rank
    found = [torch.empty(2, device="sim") for _ in range(2)] if rank == 0 else None
    dist.gather(own, found, dst=0)
    assert rank or [t.tolist() for t in found] == [[0, 1], [10, 11]]
    if rank == 0:
        dist.send(own, 1)
    else:
        dist.recv(sent, 0)
        assert sent.tolist() == [0, 1]
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, own, peer), dist.P2POp(dist.irecv, sent, peer)]):
        work.wait()
    assert sent.tolist() == [10.0 * peer, 10.0 * peer + 1]
    dist.barrier()


@pytest.mark.parametrize("seed", SEEDS)
@on_sim(2)
def test_coalesced_collectives(seed):
    """A coalesced group gives what its collectives give one by one."""
    rank = dist.get_rank()
    sums = [of(rank), of(rank + 1)]
    with _coalescing_manager(device=torch.device("sim"), async_ops=True) as manager:
        for each in sums:
            dist.all_reduce(each)
    manager.wait()
    assert [each.item() for each in sums] == [1, 3]
    inputs, outputs = [of(rank), of(rank + 5)], [torch.empty(2, device="sim") for _ in range(2)]
    with _coalescing_manager():
        for output, each in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, each)
    assert [output.tolist() for output in outputs] == [[0, 1], [5, 6]]
    parts = [torch.empty(1, device="sim") for _ in range(2)]
    with _coalescing_manager():
        for part, output in zip(parts, outputs, strict=True):
            dist.reduce_scatter_tensor(part, output)
    assert [part.item() for part in parts] == [2.0 * rank, 2.0 * (5 + rank)]


@pytest.mark.parametrize("waits", [False, True])
@on_sim(1, 2)
def test_a_result_is_read_after_its_work(waits):
    """Reading the output of an asynchronous collective without ``wait()`` is a race."""
    own, gathered = filled(1), filled(0, 8 * dist.get_world_size())
    work = dist.all_gather_into_tensor(gathered, own, async_op=True)
    if waits:
        work.wait()
    gathered + 1
    assert bool(races_taken()) != waits


@pytest.mark.parametrize("waits", [False, True])
@on_sim(2)
def test_a_collective_reads_its_input_later(waits):
    """Overwriting the input of an asynchronous collective before its end is a race."""
    own, gathered = filled(1), filled(0, 16)
    work = dist.all_gather_into_tensor(gathered, own, async_op=True)
    if waits:
        work.wait()
    own.zero_()
    assert bool(races_taken()) != waits
    work.wait()


@pytest.mark.parametrize("seed", SEEDS)
@on_sim(2)
def test_a_future_runs_what_depends_on_the_result(seed):
    """``Work.get_future().then(...)`` sees the result, and who waits for the future is ordered after it."""
    total = of(dist.get_rank() + 1.0)
    future = dist.all_reduce(total, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2).wait()
    assert doubled.item() == 6


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 5])
@on_sim(2)
def test_collectives_of_a_group_run_in_the_order_of_their_calls(seed):
    """In every order of work, collectives of one group run one after another, as they were issued."""
    own = filled(dist.get_rank(), 4)
    sim.reset()
    works = [dist.all_reduce(own, async_op=True), dist.all_gather_into_tensor(filled(0, 8), own, async_op=True)]
    works.append(dist.broadcast(own, 0, async_op=True))
    for work in works:
        work.wait()
    assert own.tolist() == [1.0] * 4
    named = {"allreduce", "all_gather", "broadcast"}
    issued = [(name, stream) for name, _, stream, _, _ in sim.trace() if name in named]
    assert [name for name, _ in issued] == ["allreduce", "all_gather", "broadcast"]
    assert len({stream for _, stream in issued}) == 1


def call_different_collectives():
    """Rank 0 reduces where rank 1 gathers."""
    if dist.get_rank() == 0:
        dist.all_reduce(filled(1))
    else:
        dist.all_gather_into_tensor(torch.empty(16, device="sim"), filled(1))
    torch.accelerator.synchronize()


def test_ranks_that_call_different_collectives_raise():
    """Where a collective library would hang, every rank says what each rank called."""
    if sim.why_missing():
        pytest.skip(sim.why_missing())
    with pytest.raises(AssertionError) as raised:
        pool().run(2, Body(__name__, "call_different_collectives"))
    text = str(raised.value)
    assert text.count("rank 0: allreduce of 8 Float\n    rank 1: all_gather of 8 Float") == 2
