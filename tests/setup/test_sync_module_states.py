"""`sync_module_states` copies rank 0's values to every rank, once; without it ranks that differ get a warning."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.errors import RanksDisagreeError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import ShardingStrategy
from fairshard.utils.groups import communicator
from fairshard.utils.messages import broadcast_tensors
from tests.kit import CollectiveCounter, rank_device
from tests.models import Tiny, loss_of_tiny, mlp, tiny, wrap_each, wrap_tiny
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, randn, train_both


class Buffers(nn.Module):
    """Parameters and buffers of every kind that a broadcast must handle."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("flag", torch.tensor(rank == 0))
        self.register_buffer("count", torch.tensor(10 + rank), persistent=False)
        self.register_buffer("short", torch.randn(7).to(torch.bfloat16))
        self.register_buffer("phase", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("turned", torch.randn(4, 6).t())
        self.register_buffer("wide", torch.randn(3, 1).expand(3, 4))
        self.register_buffer("nothing", None)

    def forward(self, x):
        return self.conv(x).sum()


@on_ranks(1, in_full(2), 3)
@pytest.mark.parametrize("flatten", [True, False], ids=["flat", "unflattened"])
@pytest.mark.parametrize("offload", [False, True], ids=["device", "offload"])
def test_all_ranks_have_what_rank_0_has(flatten, offload):
    """Parameters and buffers of every dtype, shape and layout, empty and frozen ones too."""
    expected = Buffers(0).to(rank_device())
    wrapped = FSDP(
        Buffers(dist.get_rank()).to(rank_device()),
        sync_module_states=True,
        flatten_parameters=flatten,
        cpu_offload=offload,
    )
    actual = {name: value.to(rank_device()) for name, value in wrapped.state_dict().items()}
    assert_same_state(actual, expected.state_dict())
    assert wrapped.count.item() == 10


@on_ranks(1, in_full(2), 3)
def test_it_trains_as_ddp_does():
    """Nested units, seeded differently on each rank, train as a replica of rank 0's model."""
    wrapped = wrap_tiny(tiny(seed=dist.get_rank()), sync_module_states=True)
    train_both(tiny(seed=0), wrapped, loss_of_tiny, num_steps=2)


@on_ranks(2)
def test_each_tensor_is_sent_once():
    """An outer unit does not send what inner ones have sent, and sends a tied weight once."""
    model = tiny(seed=dist.get_rank())
    nbytes = sum(param.nbytes for param in model.parameters())
    with CollectiveCounter() as counter:
        wrap_tiny(model, sync_module_states=True)
    sent = [size for method, size in counter.calls if method == "broadcast"]
    assert len(sent) == 5
    assert sum(sent) == nbytes


@on_ranks(in_full(2), 3)
@pytest.mark.parametrize("cap", [1, 7, 40, 64, 10**6])
def test_buckets_hold_at_most_their_cap(cap):
    """Tensors longer than a bucket are sent in parts, shorter ones together, for any positions of the cuts."""
    comm = communicator(dist.group.WORLD)
    shapes = [(3,), (), (0,), (5, 2), (1,), (6, 3)]

    def values(rank):
        torch.manual_seed(rank)
        made = [torch.randn(shape).to(rank_device()) for shape in shapes]
        return [*made, torch.arange(3, dtype=torch.int8, device=rank_device()) + rank]

    own = values(dist.get_rank())
    nbytes = sum(value.nbytes for value in own)
    with CollectiveCounter() as counter:
        broadcast_tensors(own, rank_device(), cap, comm.group)
    sizes = [size for _, size in counter.calls]
    assert sum(sizes) == nbytes
    assert len(sizes) == -(-nbytes // cap)
    assert max(sizes) <= cap
    for actual, expected in zip(own, values(0), strict=True):
        assert torch.equal(actual, expected)


@on_ranks(2)
@pytest.mark.parametrize("on_meta", [(1,), (0, 1)], ids=["others", "all"])
@pytest.mark.parametrize("with_fn", [True, False], ids=["fn", "reset"])
def test_other_ranks_may_be_on_the_meta_device(on_meta, with_fn):
    """Rank 0 has or creates values; the others receive them and need no more memory than one unit."""

    def empty_own(module):
        module.to_empty(device=rank_device(), recurse=False)
        if dist.get_rank() == 0 and hasattr(module, "reset_parameters"):
            module.reset_parameters()

    def build():
        with torch.device("meta" if dist.get_rank() in on_meta else rank_device()):
            return nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))

    torch.manual_seed(4)
    expected = nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.Linear(9, 3)).to(rank_device())
    torch.manual_seed(4 + dist.get_rank())
    wrapped = wrap_each(build(), sync_module_states=True, param_init_fn=empty_own if with_fn else None)
    assert_same_state(wrapped.state_dict(), expected.state_dict())


class Unready(nn.Module):
    """Has no way to be initialised."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))


@on_ranks(2)
def test_a_module_that_receives_needs_no_reset_parameters():
    """If rank 0's module has values, those of other ranks need no way to initialise."""
    with torch.device("meta" if dist.get_rank() else rank_device()):
        model = Unready()
    assert FSDP(model, sync_module_states=True).state_dict()["gain"].tolist() == [1.0] * 3


@on_ranks(in_full(2), 3)
def test_a_rank_that_cannot_initialise_makes_all_raise():
    """If rank 0 cannot initialise, all ranks raise and none waits."""
    with torch.device("meta"):
        model = Unready()
    with pytest.raises(ValueError, match="`reset_parameters\\(\\)`"):
        FSDP(model, sync_module_states=True)


@on_ranks(2)
def test_other_shapes_are_told_before_anything_is_sent():
    """If shapes differ, every rank raises before anything is sent, and names the first difference."""
    shapes = r"`weight` \(3, 4\).*`weight` \(3, 5\)"
    with CollectiveCounter() as counter, pytest.raises(RanksDisagreeError, match=shapes):
        FSDP(nn.Linear(4 + dist.get_rank(), 3), sync_module_states=True)
    assert counter.count("broadcast") == 0


@on_ranks(3)
def test_rank_0_of_the_group_counts():
    """A unit with its own process group is sent from that group's first rank."""
    group = dist.new_group([1, 2])
    if dist.get_rank() > 0:
        wrapped = FSDP(mlp(3, 4, seed=dist.get_rank()), group, sync_module_states=True)
        assert_same_state(wrapped.state_dict(), mlp(3, 4, seed=1).state_dict())
    dist.barrier()


def warnings_of(model, *inputs):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(*inputs)
    return [str(warning.message) for warning in caught if "same weights" in str(warning.message)]


@on_ranks(in_full(2), 3)
@pytest.mark.parametrize("kwargs", [{}, {"cpu_offload": True}, {"flatten_parameters": False}], ids=str)
def test_ranks_that_begin_with_other_weights_are_told(kwargs):
    """The first forward warns once, on every rank, and names a parameter that differs."""
    model = mlp(3, 5, 4, seed=1)
    with torch.no_grad():
        model[2].bias.add_(dist.get_rank())
    wrapped = wrap_each(model, **kwargs)
    (message,) = warnings_of(wrapped, randn(2, 3))
    assert "`2.bias` differed between ranks 0 and 1" in message
    assert warnings_of(wrapped, randn(2, 3)) == []


@on_ranks(2)
def test_weights_in_another_order_are_told():
    """The same values, but rows in another order on rank 1, as if heads or experts were sorted there."""
    model = mlp(3, 5, 4, seed=1)
    if dist.get_rank() == 1:
        model[2].weight.data = model[2].weight.data.flip(0)
    (message,) = warnings_of(wrap_each(model), randn(2, 3))
    assert "`2.weight` differed between ranks 0 and 1" in message


@on_ranks(4)
def test_ranks_of_a_group_are_named_by_their_numbers_among_all():
    """A model on ranks 2 and 3."""
    group = dist.new_group([2, 3])
    if dist.get_rank() > 1:
        model = FSDP(mlp(3, 5, seed=dist.get_rank()), process_group=group)
        assert "differed between ranks 2 and 3" in warnings_of(model, randn(2, 3))[0]


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_weights_of_any_dtype_are_told(dtype):
    """A difference in any dtype warns, because the checksum compares bits."""
    model = mlp(3, 5, seed=dist.get_rank()).to(dtype)
    assert len(warnings_of(FSDP(model), randn(2, 3).to(dtype))) == 1


def without_sync(model):
    with model.no_sync():
        pass


def without_sync_on_first(model):
    if dist.get_rank() == 0:
        without_sync(model)


def summon(model):
    with model.summon_full_params():
        pass


@on_ranks(2)
@pytest.mark.parametrize("use", [without_sync, without_sync_on_first, summon, FSDP.state_dict])
def test_other_weights_are_told_whatever_is_used_first(use):
    """`no_sync`, also on one rank alone, a state dict or whole parameters: the first forward after them warns."""
    model = wrap_each(mlp(3, 5, 4, seed=dist.get_rank()))
    use(model)
    assert len(warnings_of(model, randn(2, 3))) == 1


@on_ranks(in_full(1), 2)
def test_nothing_is_said_where_all_is_well():
    """No warning for ranks that were seeded alike, synced, or have loaded weights since."""
    rank = dist.get_rank()
    assert warnings_of(wrap_each(mlp(3, 5, 4)), randn(2, 3)) == []
    assert warnings_of(wrap_each(mlp(3, 5, 4, seed=rank), sync_module_states=True), randn(2, 3)) == []
    wrapped = wrap_each(mlp(3, 5, 4, seed=rank))
    wrapped.load_state_dict(mlp(3, 5, 4).state_dict())
    assert warnings_of(wrapped, randn(2, 3)) == []
    wrapped = wrap_each(mlp(3, 5, 4, seed=rank))
    with torch.no_grad():
        for param in wrapped.parameters():
            param.fill_(1.0)
    assert warnings_of(wrapped, randn(2, 3)) == []


@on_ranks(2)
def test_an_inner_unit_that_was_not_synced_is_named():
    """If an inner wrapper was not synced, the outer one warns that its own setting has no effect there."""
    model = tiny()
    model.first = FSDP(model.first)
    with pytest.warns(UserWarning, match="has no effect on the inner unit `first`"):
        FSDP(model, sync_module_states=True)


@on_ranks(2)
def test_tied_weights_of_meta_modules_are_received_once():
    """A tied weight stays tied on the rank that had no memory."""
    torch.manual_seed(1)
    with torch.device("meta" if dist.get_rank() else rank_device()):
        model = Tiny()
    wrapped = wrap_tiny(model, sync_module_states=True)
    assert_same_state(wrapped.state_dict(), tiny(seed=1).state_dict())


def strategy_of(name):
    """NO_SHARD, or two replicas of two shards each."""
    if name == "NO_SHARD":
        return {"sharding_strategy": ShardingStrategy.NO_SHARD}
    mesh = dist.init_device_mesh(rank_device().type, (2, 2))
    return {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}


@on_ranks(4)
@pytest.mark.parametrize("name", ["NO_SHARD", "HYBRID_SHARD"])
def test_replicas_receive_too(name):
    """All values come from the first rank of all groups, sharded or replicated, also for modules on the meta device."""
    with torch.device("meta" if dist.get_rank() in (1, 2) else rank_device()):
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    wrapped = wrap_each(model, sync_module_states=True, **strategy_of(name))
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).to(rank_device())
    assert_same_state(wrapped.state_dict(), expected.state_dict())


@on_ranks(4)
@pytest.mark.parametrize("name", ["NO_SHARD", "HYBRID_SHARD"])
def test_replicas_that_differ_are_told(name):
    """A difference between replicas only is reported on the ranks of both."""
    wrapped = FSDP(mlp(3, 5, seed=dist.get_rank() // 2), **strategy_of(name))
    assert len(warnings_of(wrapped, randn(2, 3))) == 1
