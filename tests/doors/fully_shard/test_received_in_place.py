"""Large parameters are received where they compute: only small ones are copied out, and there is no buffer."""

import copy
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fairshard.nn import fully_shard
from fairshard.utils.collectives import counters, exchange_tag, reset_counters
from fairshard.utils.groups import communicator
from fairshard.utils.placed_layout import RowsLayout
from fairshard.utils.transfers import Transfer
from fairshard.views.received_in_place import PartGather, ReceivedInPlace, large_params
from tests.doors.fully_shard.test_custom_comms import CountingGather
from tests.kit import CopyCounter
from tests.on_ranks import on_ranks

pytestmark = pytest.mark.behaviour("parameters received in place")

ON_HOSTS = pytest.mark.cpu_only("accelerators gather rows")


class Layers(nn.Module):
    """A large weight, whose rows do not divide by 2 or 3; a bias, and a weight of one row, which most ranks lack."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(400, 401)
        self.two = nn.Linear(401, 1)

    def forward(self, x):
        return self.two(self.one(x).relu())


def test_the_large_parameters():
    """Those that are cut and have at least 128 KiB for each rank; at most 255 of them."""
    sizes = [(4, 16384), (4, 16383), (None, 1 << 20), (0, 4), (1, 65536)]
    assert large_params(RowsLayout(sizes, 2), 4) == [0, 4]
    assert large_params(RowsLayout(sizes, 2), 2) == []
    assert large_params(RowsLayout(sizes, 3), 4) == []
    assert large_params(RowsLayout([(4, 16384)] * 300, 2), 4) == list(range(255))


@ON_HOSTS
@on_ranks(2, 3, 4)
def test_only_small_parameters_are_copied_out():
    """A gather counts once, writes this rank's rows, and copies small parameters; its buffer never has memory."""
    model = fully_shard(Layers())
    model(torch.ones(2, 400)).sum().backward()
    (flat_param,) = model._fairshard_unit.flat_params
    gathered, numel = flat_param.gathered, sum(param.numel() for param in model.parameters())
    assert isinstance(gathered, ReceivedInPlace)
    reset_counters()
    with CopyCounter() as copies:
        model.unshard()
    assert copies.total_nbytes() < 4 * (numel / dist.get_world_size() + 2000)
    own = sum(param.to_local().nbytes for param in fully_shard(Layers()).parameters())
    assert counters()["all_gather"][0] == 1
    assert 4 * numel - own <= counters()["all_gather"][1] <= 4 * (numel + 1000 * dist.get_world_size()) - own
    assert gathered.kept_line.untyped_storage().nbytes() == gathered.kept_line.nbytes
    assert not gathered.buffer.untyped_storage().nbytes()
    assert not gathered._staging.nbytes()
    model.reshard()
    assert not gathered.kept_line.untyped_storage().nbytes()


@on_ranks(2, 3)
@pytest.mark.parametrize("size", [400, 5], ids=["received in place", "copied out"])
def test_whole_parameters_begin_at_aligned_addresses(size):
    """Kernels round otherwise at other addresses, so bits would not be those of plain parameters."""
    model = fully_shard(nn.Sequential(nn.Linear(size, size + 1), nn.Linear(size + 1, 1), nn.Linear(1, 7)))
    model.unshard()
    assert [param.data_ptr() % 64 for param in model.parameters()] == [0] * 6


@ON_HOSTS
@on_ranks(3)
def test_a_rank_without_rows_gathers():
    """Four rows on three ranks leave none for the last; all parameters of a unit may be like that."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(24576, 4, bias=False) for _ in range(2))), torch.randn(2, 24576)
    model.forward = lambda x: model[0](x) + model[1](x)
    expected = model(x)
    fully_shard(model)
    assert torch.equal(model(x), expected)
    assert isinstance(model._fairshard_unit.flat_params[0].gathered, ReceivedInPlace)


@ON_HOSTS
@on_ranks(2, 3)
def test_a_custom_gather_uses_the_buffer():
    """The user's own gather, set between passes, gets whole rows in place of messages."""
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(2, 400)
    expected = model(x)
    fully_shard(model)
    assert torch.equal(model(x), expected)
    custom = CountingGather()
    model.set_custom_all_gather(custom)
    model.reshard()
    assert torch.equal(model(x), expected)
    assert custom.num_calls == 1


@ON_HOSTS
@on_ranks(2, 3)
def test_a_gather_that_nobody_waits_for():
    """It is ended before the next gather, which brings the new weights; resharding frees all of its memory."""
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(2, 400)
    plain = copy.deepcopy(model)
    fully_shard(model)
    model(x)
    (flat_param,) = model._fairshard_unit.flat_params
    gathered = flat_param.gathered
    model.reshard()  # the root keeps its parameters after a forward
    model.unshard(async_op=True)
    assert gathered._staging.nbytes()
    model.reshard()
    assert not gathered.kept_line.untyped_storage().nbytes()
    assert not gathered._staging.nbytes()
    for _ in range(3):
        model.unshard(async_op=True)
        running = gathered.transfer
        assert running.works
        with torch.no_grad():
            for param in [*model.parameters(), *plain.parameters()]:
                (param.to_local() if isinstance(param, DTensor) else param).mul_(1.5)
            with mock.patch.object(Transfer, "wait", autospec=True, side_effect=Transfer.wait) as wait:
                result = model(x)
        assert mock.call(running) in wait.mock_calls
        assert torch.equal(result, plain(x))


@ON_HOSTS
@on_ranks(3)
def test_each_message_has_a_tag_of_its_own():
    """Messages from one rank to another that run at the same time differ in their tags."""
    comm, seen = communicator(dist.group.WORLD), []
    done = SimpleNamespace(is_completed=lambda: True)
    exchange = SimpleNamespace(
        recv=lambda tensors, peer, tag: seen.append(("recv", peer, tag)) or done,
        send=lambda tensors, peer, tag: seen.append(("send", peer, tag)) or done,
    )
    with mock.patch.object(comm, "exchange", exchange):
        parts = [[torch.zeros(rank + number) for rank in range(3)] for number in range(4)]
        PartGather(comm, torch.zeros(3, 2), parts).start(exchange_tag("all_gather", 5, 1))
    left_out = 2 if dist.get_rank() == 0 else 1  # rank 0 has nothing of the first part: it sends none to two ranks
    assert len(seen) == 2 * 2 * 5 - left_out
    assert len(set(seen)) == len(seen)
