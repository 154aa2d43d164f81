"""The engine's collectives give the right numbers on every path, and count themselves."""

import datetime
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fairshard.errors import CollectiveFailedError, FairshardError
from fairshard.utils.agree import agree
from fairshard.utils.collectives import RowGather, counters, exchange_tag, reset_counters
from fairshard.utils.groups import (
    backend_name,
    communicator,
    default_group,
    gloo_twin,
    group_of_one,
    subgroup,
    timeout_of,
)
from fairshard.utils.messages import gather_scalars
from fairshard.utils.transfers import Transfer
from tests.kit import CollectiveCounter, fake_group, rank_device
from tests.on_ranks import on_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def value_of(rank, row, numel, dtype):
    """What ``rank`` holds in ``row``: numbers whose sum depends on the order of addition."""
    random = torch.Generator().manual_seed(100 * rank + row)
    return torch.randn(numel, generator=random, dtype=torch.float64, device="cpu").to(dtype)


def buffer_of(rank, world_size, numel, dtype):
    rows = [value_of(rank, row, numel, dtype) for row in range(world_size)]
    return torch.stack(rows).to(rank_device())


# 5 or more ranks use gloo's native all-gather and all-to-all, 2 to 4 the direct exchange.
@on_ranks(1, 2, 3, 4, 5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 1000])
def test_all_gather_fills_every_row(dtype, numel):
    """Row ``r`` of the buffer is what rank ``r`` had written there."""
    comm = communicator(dist.group.WORLD)
    buffer = torch.full((comm.world_size, numel), -1.0, dtype=dtype, device=rank_device())
    buffer[comm.rank] = value_of(comm.rank, 0, numel, dtype)
    RowGather(comm, buffer).start(exchange_tag("all_gather", comm.new_id(), 0)).wait()
    expected = torch.stack([value_of(rank, 0, numel, dtype) for rank in range(comm.world_size)])
    assert torch.equal(buffer.cpu(), expected)


@on_ranks(1, 2, 3, 4, 5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 1000])
def test_reduce_scatter_adds_in_rank_order(dtype, numel):
    """The sum of row ``rank`` over ranks, added in rank order in fp32 or wider, to the bit."""
    comm = communicator(dist.group.WORLD)
    bucket = buffer_of(comm.rank, comm.world_size, numel, dtype)
    reduced = comm.reduce_scatter(bucket, exchange_tag("reduce_scatter", comm.new_id(), 0)).wait()
    wide = torch.promote_types(dtype, torch.float32)
    rows = [value_of(rank, comm.rank, numel, dtype).to(wide) for rank in range(comm.world_size)]
    expected = functools.reduce(torch.add, rows)
    if rank_device().type == "cpu":
        assert torch.equal(reduced.to(wide), expected)
    else:
        rounding = comm.world_size * torch.finfo(dtype).eps / 2 * torch.stack(rows).abs().sum(0)  # of each addition
        assert ((reduced.cpu().to(wide) - expected).abs() <= rounding).all()


@on_ranks(1, 2, 3, 5)
@pytest.mark.parametrize("numel", [1, 7])
def test_a_sum_over_ranks_is_in_rank_order_too(numel):
    """Every rank gets the sum of all elements, to the bit; on gloo the summands stay."""
    comm = communicator(dist.group.WORLD)
    every = [value_of(rank, 0, numel, torch.float32) for rank in range(comm.world_size)]
    own = every[comm.rank].to(rank_device())
    found = comm.sum_over_ranks(own, exchange_tag("reduce_scatter", comm.new_id(), 0)).wait().cpu()
    expected = functools.reduce(torch.add, every)
    if rank_device().type == "cpu":
        assert torch.equal(found, expected)
        assert torch.equal(own, every[comm.rank])
    else:
        torch.testing.assert_close(found, expected)


@on_ranks(2, 3)
def test_many_under_way_and_waited_for_in_any_order():
    """Exchanges of several flat params, started together and waited for in reverse order, do not mix."""
    comm = communicator(dist.group.WORLD)
    pending = []
    for number in range(12):
        numel = 3 + number % 4
        buffer = torch.zeros(comm.world_size, numel, device=rank_device())
        buffer[comm.rank] = 100 * number + comm.rank
        bucket = torch.full((comm.world_size, numel), float(number), device=rank_device())
        source = comm.new_id()
        gathered = RowGather(comm, buffer).start(exchange_tag("all_gather", source, 0))
        reduced = comm.reduce_scatter(bucket, exchange_tag("reduce_scatter", source, 0))
        pending.append((number, buffer, gathered, reduced))
    for number, buffer, gathered, reduced in reversed(pending):
        gathered.wait()
        assert buffer[:, 0].tolist() == [100 * number + rank for rank in range(comm.world_size)]
        assert reduced.wait().unique().tolist() == [number * comm.world_size]


@pytest.mark.cpu_only("only gloo has tags: other collectives must start in the same order on all ranks")
@on_ranks(2)
def test_ranks_may_start_exchanges_in_different_order():
    """Tags identify each exchange, so two ranks that start two gathers in opposite order get the right rows."""
    comm = communicator(dist.group.WORLD)
    buffers = [torch.full((2, 3), -1.0) for _ in range(2)]
    for number, buffer in enumerate(buffers):
        buffer[comm.rank] = 10 * number + comm.rank
    order = [0, 1] if comm.rank == 0 else [1, 0]
    transfers = [RowGather(comm, buffers[i]).start(exchange_tag("all_gather", 7 + i, 0)) for i in order]
    for transfer in transfers:
        transfer.wait()
    assert [buffer[:, 0].tolist() for buffer in buffers] == [[0, 1], [10, 11]]


def test_tags_are_31_bits_and_differ():
    """Tags of different kinds, sources, uses and members differ, and fit into what gloo sends."""
    tags = {
        exchange_tag(kind, source, uses, members)
        for kind in ("all_gather", "reduce_scatter")
        for source in range(1, 30)
        for uses in range(4)
        for members in (0, 5, 255)
    }
    assert len(tags) == 2 * 29 * 4 * 3
    assert all(0 <= tag < 2**31 for tag in tags)
    assert 0 <= exchange_tag("reduce_scatter", 10**9, 10**9, 10**9) < 2**31


@on_ranks(1, 2, 3)
@pytest.mark.parametrize(("op", "expected"), [("sum", sum), ("max", max), ("min", min)])
def test_all_reduce_combines_in_place(op, expected):
    """Every rank ends with the sum, the largest or the smallest of all."""
    comm = communicator(dist.group.WORLD)
    tensor = torch.tensor([comm.rank + 1.0], device=rank_device())
    comm.all_reduce(tensor, op).wait()
    assert tensor.item() == expected(rank + 1 for rank in range(comm.world_size))


@on_ranks(1, 2, 3)
def test_agree_tells_whether_all_passed_the_same():
    """`agree` is true on all ranks or false on all, whichever rank differs, up to 63 bits."""
    comm = communicator(dist.group.WORLD)
    large = 2**56 - 3
    assert agree(comm, large, rank_device())
    for odd in range(comm.world_size):
        assert agree(comm, large - (comm.rank == odd), rank_device()) == (comm.world_size == 1)


@on_ranks(1, 3)
def test_objects_and_scalars_of_every_rank():
    """`gather_objects` and `gather_scalars` return what every rank passed, in rank order, on every rank."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    assert communicator(dist.group.WORLD).gather_objects(f"rank {rank}") == [f"rank {r}" for r in range(world_size)]
    assert gather_scalars([rank, 0.5], device=rank_device()) == [[float(r), 0.5] for r in range(world_size)]


@pytest.mark.cpu_only("counts the calls that gloo needs")
@on_ranks(2, 3)
def test_counters_count_number_and_bytes():
    """A collective counts once: received bytes of an all-gather, sent of a reduce-scatter, held of an all-reduce."""
    comm = communicator(dist.group.WORLD)
    others = comm.world_size - 1
    reset_counters()
    assert counters() == {}
    with CollectiveCounter() as patched:
        RowGather(comm, torch.zeros(comm.world_size, 5)).start(1).wait()
        comm.reduce_scatter(torch.zeros(comm.world_size, 7, dtype=torch.bfloat16), 2).wait()
        comm.all_reduce(torch.zeros(3)).wait()
    gathered, scattered, reduced = others * 5 * 4, others * 7 * 2, 3 * 4
    assert counters() == {
        "all_gather": (1, gathered),
        "reduce_scatter": (1, scattered),
        "all_reduce": (1, reduced),
    }
    assert patched.nbytes("recv") == patched.nbytes("send") == gathered + scattered
    assert patched.count("recv") == patched.count("send") == 2 * others
    assert patched.nbytes("allreduce") == reduced
    reset_counters()
    assert counters() == {}


@on_ranks(1)
def test_alone_nothing_moves():
    """With one rank there are no collectives, hence no counts."""
    comm = communicator(dist.group.WORLD)
    reset_counters()
    with CollectiveCounter() as patched:
        RowGather(comm, torch.zeros(1, 5)).start(1).wait()
        comm.reduce_scatter(torch.zeros(1, 5), 2).wait()
        comm.all_reduce(torch.zeros(3)).wait()
    assert counters() == {}
    assert patched.calls == []


def test_a_transfer_waits_for_every_work_even_when_one_fails():
    """If one work fails, the transfer still waits for the others, then raises our error with the cause."""
    waited = []

    class Work:
        def __init__(self, name):
            self.name = name

        def wait(self):
            waited.append(self.name)
            if self.name == "bad":
                raise RuntimeError("peer is gone")

    transfer = Transfer([Work("bad"), Work("good")])
    with pytest.raises(FairshardError, match="peer is gone"):
        transfer.wait()
    assert waited == ["bad", "good"]


def test_default_group_needs_one():
    """Without `init_process_group` the default group raises a ValueError that says so."""
    with pytest.raises(ValueError, match="init_process_group"):
        default_group()
    with fake_group(2):
        assert default_group() is dist.group.WORLD


@on_ranks(2)
def test_there_is_one_communicator_for_a_group():
    """The same group gives the same communicator, another group another."""
    other = dist.new_group()
    assert communicator(dist.group.WORLD) is communicator(dist.group.WORLD)
    assert communicator(other) is not communicator(dist.group.WORLD)
    assert backend_name(other, torch.device("cpu")) == "gloo"
    assert backend_name(other, torch.device("meta")) is None


@on_ranks(2)
def test_a_group_that_cannot_connect_is_explained():
    """The ranks of a group connect when its communicator is created; if one has died, the others raise by name."""
    group, cause = dist.new_group(), RuntimeError("Gloo connectFullMesh failed with: Connect timeout")
    with mock.patch.object(dist, "new_group", side_effect=cause), pytest.raises(CollectiveFailedError) as caught:
        communicator(group)
    assert "Connect timeout" in str(caught.value)
    assert caught.value.__cause__ is cause
    assert communicator(group).world_size == 2


@on_ranks(2)
def test_a_subgroup_has_the_timeout_of_the_group_that_it_is_in():
    """Otherwise its ranks would wait for one that has gone for torch's half an hour."""
    seconds = datetime.timedelta(seconds=100)
    within = dist.new_group(timeout=seconds)
    assert timeout_of(subgroup([dist.get_rank()], within)) == timeout_of(gloo_twin(within)) == seconds


@on_ranks(3)
def test_ranks_may_have_different_numbers_of_groups():
    """A rank with groups that others lack still finds them in a new one, of ours or torch's, under one name."""
    world = default_group()
    if dist.get_rank() == 0:
        assert communicator(group_of_one()).world_size == 1
    pair = dist.new_group([0, 2])
    twins = [gloo_twin(world)]
    if dist.get_rank() != 1:
        comm = communicator(pair)
        rows = torch.full((2, 3), float(dist.get_rank()), device=rank_device())
        RowGather(comm, rows).start(exchange_tag("all_gather", comm.new_id(), 0)).wait()
        assert rows.tolist() == [[0.0] * 3, [2.0] * 3]
    twins.append(subgroup([0, 1, 2], world))
    for twin in twins:
        assert gather_scalars([dist.get_rank()], twin) == [[0.0], [1.0], [2.0]]
