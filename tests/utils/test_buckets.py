"""The bucketer as the engine uses it: with a plan, and right whatever happens in the pass."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fairshard.utils.buckets import Bucket, Bucketer, Division
from fairshard.utils.collectives import Communicator, Communicators, counters, reset_counters
from fairshard.utils.groups import communicator
from fairshard.utils.streams import Stream
from fairshard.views.ragged import OwnedBucket
from tests.kit import delayed, rank_device
from tests.on_ranks import on_ranks

MB = 1024 * 1024


class Source:
    """A gradient of ``shard_numel`` elements for each rank: ``rank + value`` everywhere."""

    log = []

    def __init__(self, name, shard_numel, dtype=torch.float32):
        self.name, self.shard_numel, self.reduce_dtype = name, shard_numel, dtype
        comm = communicator(dist.group.WORLD)
        self.comms = Communicators(comm, comm)
        self.bucket_kind, self.line = Bucket, self
        self.layout = SimpleNamespace(padded_numel=shard_numel * comm.world_size)
        self.compute_device = rank_device()
        self.reduce_id = self.replica_id = comm.new_id()
        self.division = Division(1.0, float(comm.world_size))
        self.lands_at_once, self.landing_dtype = False, None
        self.value = 0.0
        self.accepted = []

    def bucket_views(self, columns):
        return [columns]

    def write_grads(self, views):
        views[0].fill_(dist.get_rank() + self.value)

    def take_kept(self):
        return None

    def accept_grad(self, reduced):
        assert reduced.shape == (self.shard_numel,)
        self.accepted.append(reduced.unique().tolist())
        Source.log.append(self.name)


def bucketer_of(cap_mb):
    return Bucketer(cap_mb, Stream(torch.device("cpu")))


def mean(value=0.0):
    """The reduced gradient that `Source` must get: the mean of ``rank + value``."""
    return [sum(range(dist.get_world_size())) / dist.get_world_size() + value]


def sources(*numels):
    Source.log = []
    return [Source(chr(97 + index), numel) for index, numel in enumerate(numels)]


def sent():
    return counters().get("reduce_scatter", (0, 0))


@on_ranks(2, 3)
def test_a_planned_pass_is_one_exact_bucket():
    """Sources that fit into the cap share one reduce-scatter of exactly their width; means arrive in plan order."""
    own = sources(3, 5, 1)
    bucketer = bucketer_of(25)
    for _ in range(3):
        bucketer.plan(own)
        reset_counters()
        for source in own:
            bucketer.reduce(source)
        bucketer.drain()
        assert sent() == (1, (dist.get_world_size() - 1) * (3 + 5 + 1) * 4)
    assert [source.accepted for source in own] == [[mean()] * 3] * 3
    assert Source.log == ["a", "b", "c"] * 3


@on_ranks(2)
@pytest.mark.parametrize("numels", list(itertools.permutations([1, 2, 3])), ids=str)
def test_buckets_are_cut_at_the_cap(numels):
    """With room for 3 elements of each rank, sources share a bucket while they fit, in plan order."""
    own = sources(*numels)
    bucketer = bucketer_of(3 * 4 * 2 / MB)
    bucketer.plan(own)
    reset_counters()
    for source in own:
        bucketer.reduce(source)
    bucketer.drain()
    expected, room = 0, 0
    for numel in numels:
        if numel > room:
            expected, room = expected + 1, 3
        room -= numel
    assert sent() == (expected, 6 * 4)
    assert [source.accepted for source in own] == [[mean()]] * 3


@on_ranks(2)
def test_a_plan_is_a_hint():
    """Means are right in another order, with an unplanned source, and with a source that is reduced twice."""
    a, b, c, stranger = sources(3, 5, 1, 4)
    bucketer = bucketer_of(25)
    bucketer.plan([a, b, c])
    for source in (c, stranger, a):
        bucketer.reduce(source)
    a.value = 10.0
    bucketer.reduce(a)
    bucketer.reduce(b)
    bucketer.drain()
    assert sorted(a.accepted) == [mean(), mean(10.0)]
    assert b.accepted == c.accepted == stranger.accepted == [mean()]


@on_ranks(2)
def test_what_does_not_come_is_not_waited_for():
    """A planned source that is not reduced delays nothing and gets no gradient; the next pass is complete."""
    a, b, c = sources(3, 5, 1)
    bucketer = bucketer_of(25)
    bucketer.plan([a, b, c])
    bucketer.reduce(a)
    bucketer.reduce(c)
    bucketer.drain()
    assert (a.accepted, b.accepted, c.accepted) == ([mean()], [], [mean()])
    for source in (a, b, c):
        bucketer.reduce(source)
    bucketer.drain()
    assert (a.accepted, b.accepted, c.accepted) == ([mean()] * 2, [mean()], [mean()] * 2)


class OwnedSource(Source):
    """A gradient with a run of its own width for each rank."""

    def __init__(self, name, widths):
        super().__init__(name, max(widths))
        self.layout = SimpleNamespace(widths=widths)
        self.division = Division(2.0, 1.0)

    def write_grads(self, views):
        for run in views[0]:
            run.fill_(1.0)


@on_ranks(2)
@pytest.mark.parametrize("kind", [Bucket, OwnedBucket])
def test_what_a_rank_does_not_write_counts_as_zeros(kind):
    """A source that a rank does not reduce, or whose gradients it drops, adds nothing, whatever the memory held.

    What it writes is divided by 2 before the sum over two ranks.
    """
    widths = (3, 1), (2, 4)
    own = [OwnedSource(name, each) for name, each in zip("ab", widths, strict=True)]
    bucket = kind(own)
    for drops in (False, True):
        bucket.write(0)
        bucket.data.fill_(torch.nan)
        bucket.write(0, zeros=drops and dist.get_rank() == 1)
        reduced = bucket.launch().wait()
        numels = [max(each) if kind is Bucket else each[dist.get_rank()] for each in widths]
        assert reduced.tolist() == [0.5 if drops else 1.0] * numels[0] + [0.0] * numels[1]
        bucket.close()


@on_ranks(2)
def test_reset_forgets_an_interrupted_pass():
    """After `reset` no gradient of the interrupted pass is delivered, and the next pass is right."""
    a, b, c = sources(3, 5, 1)
    bucketer = bucketer_of(8 * 4 * 2 / MB)  # a and b share a bucket, c has its own
    bucketer.plan([a, b, c])
    bucketer.reduce(a)
    bucketer.reduce(b)
    bucketer.reset()
    before = [len(source.accepted) for source in (a, b, c)]
    bucketer.plan([a, b, c])
    for source in (a, b, c):
        bucketer.reduce(source)
    bucketer.drain()
    assert [len(source.accepted) for source in (a, b, c)] == [count + 1 for count in before]
    assert a.accepted[-1] == b.accepted[-1] == c.accepted[-1] == mean()


@pytest.mark.cpu_only("gloo's reductions end by themselves: work of a device ends when somebody waits")
@on_ranks(2)
def test_memory_is_bounded():
    """However late the other rank is, at most two buckets are in flight, and none holds memory after the pass."""
    own = sources(*[64] * 8)
    bucketer = bucketer_of(0)
    bucketer.plan(own)
    buckets = []

    def with_memory():
        return sum(bucket.data.untyped_storage().size() > 0 for bucket in buckets)

    with delayed(Communicator, "reduce_scatter", rank=1, delay=0.01):
        for source in own:
            buckets.append(bucketer._place[source][0])
        for source in own:
            bucketer.reduce(source)
            assert with_memory() <= 2
        bucketer.drain()
    assert with_memory() == 0
    assert [source.accepted for source in own] == [[mean()]] * 8


@pytest.mark.cpu_only("gloo's reductions end by themselves: work of a device ends when somebody waits")
@on_ranks(2)
def test_few_small_buckets_are_under_way():
    """Unplanned sources have buckets of their own, far below the cap; at most two of these are in flight."""
    own = sources(*[64] * 8)
    bucketer = bucketer_of(25)
    with delayed(Communicator, "reduce_scatter", rank=1, delay=0.01):
        for source in own:
            bucketer.reduce(source)
            assert len(bucketer._flying) <= 2
        bucketer.drain()
    assert [source.accepted for source in own] == [[mean()]] * 8


@on_ranks(2)
def test_dtypes_travel_apart():
    """Sources of different reduce dtypes never share a bucket, and both means are right."""
    a, b, c = Source("a", 3), Source("b", 3, torch.bfloat16), Source("c", 3)
    bucketer = bucketer_of(25)
    bucketer.plan([a, b, c])
    reset_counters()
    for source in (a, b, c):
        bucketer.reduce(source)
    bucketer.drain()
    assert sent() == (2, 6 * 4 + 3 * 2)
    assert a.accepted == b.accepted == c.accepted == [mean()]


@on_ranks(1)
def test_alone_gradients_are_handed_over():
    """With one rank nothing is sent, and each source gets its own gradient immediately."""
    (a,) = sources(3)
    bucketer = bucketer_of(25)
    bucketer.plan([a])
    bucketer.reduce(a)
    bucketer.drain()
    assert a.accepted == [mean()]
    assert counters() == {}
