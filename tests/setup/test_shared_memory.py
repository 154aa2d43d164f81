"""Parameters that share memory are refused: shards would tear them apart."""

import pytest
import torch
from torch import nn

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import fully_shard
from tests.on_ranks import on_ranks
from tests.reference import randn

DOORS = {
    "wrapper": FSDP,
    "original parameters": lambda module: FSDP(module, use_orig_params=True),
    "fully_shard": fully_shard,
}


def pair():
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))


def by_data(net):
    net[1].weight.data = net[0].weight.data


def by_values(net):
    values = torch.ones(4, 4)
    net[0].weight, net[1].weight = nn.Parameter(values), nn.Parameter(values)


def transposed(net):
    net[1].weight.data = net[0].weight.data.t()


def in_part(net):
    values = torch.ones(6, 4)
    net[0].weight, net[1].weight = nn.Parameter(values[:4]), nn.Parameter(values[2:])


def within(net):
    net[0].extra = nn.Parameter(net[0].weight.detach()[1])


def one_frozen(net):
    by_data(net)
    net[0].weight.requires_grad_(False)


@on_ranks(1, 2)
@pytest.mark.parametrize("share", [by_data, by_values, transposed, in_part, within, one_frozen])
def test_shared_memory_is_named(share):
    """Whatever part two parameters share, and through each door, the error names both."""
    for door in DOORS.values():
        net = pair()
        share(net)
        with pytest.raises(ValueError, match=r"memory of their own, but `(0|1).\w+` shares that of `(0|1).\w+`"):
            door(net)


def beside(net):
    values = torch.ones(8, 4)
    net[0].weight, net[1].weight = nn.Parameter(values[:4]), nn.Parameter(values[4:])


def interleaved(net):
    values = torch.ones(4, 8)
    net[0].weight, net[1].weight = nn.Parameter(values[:, :4]), nn.Parameter(values[:, 4:])


def both_frozen(net):
    by_data(net)
    net.requires_grad_(False)


def empty(net):
    net[0].none, net[1].none = nn.Parameter(torch.ones(0)), nn.Parameter(torch.ones(0, 3))


def tied(net):
    net[1].weight = net[0].weight


@on_ranks(1, 2)
@pytest.mark.parametrize("share", [beside, interleaved, both_frozen, empty, tied])
def test_neighbours_in_one_memory_are_not(share):
    """Nor frozen parameters, those without elements, and modules that have one parameter together."""
    plain = pair()
    share(plain)
    for door in DOORS.values():
        net = pair()
        share(net)
        net.load_state_dict(plain.state_dict())
        net = door(net)
        torch.testing.assert_close(net(randn(2, 4)), plain(randn(2, 4)))
