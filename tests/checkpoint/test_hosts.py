"""The ring in which hosts keep copies for each other."""

import pytest

from fairshard.checkpoint.hosts import Hosts

HOSTS = [
    (((0, 1),)),
    ((0, 1), (2, 3)),
    ((0, 2), (1, 3)),
    ((0, 1), (2, 3), (4, 5)),
    ((0,), (1, 2, 3)),
    ((0, 1, 2), (3,), (4, 5)),
]


@pytest.mark.parametrize("ranks", [pytest.param(ranks, id=str(ranks)) for ranks in HOSTS[1:]])
def test_any_one_host_can_be_lost(ranks):
    """Whichever host is lost, each rank's file is on a host that is left: its own, or that of its keeper."""
    hosts = Hosts(ranks)
    for lost in range(len(ranks)):
        for own in ranks:
            for rank in own:
                assert {hosts.host_of(rank), hosts.host_of(hosts.keeper_of(rank))} - {lost}


@pytest.mark.parametrize("ranks", [pytest.param(ranks, id=str(ranks)) for ranks in HOSTS[1:]])
def test_both_sides_know_who_keeps_what(ranks):
    """A rank keeps the file of exactly those ranks whose keeper it is: sends and receives match."""
    hosts = Hosts(ranks)
    everyone = [rank for own in ranks for rank in own]
    for rank in everyone:
        assert hosts.kept_by(rank) == tuple(sorted(other for other in everyone if hosts.keeper_of(other) == rank))


def test_one_host_has_no_keeper():
    """With one host each rank keeps its own file only."""
    hosts = Hosts(((0, 1),))
    assert [hosts.keeper_of(rank) for rank in (0, 1)] == [None, None]
    assert [hosts.kept_by(rank) for rank in (0, 1)] == [(), ()]


def test_hosts_are_ranks_with_equal_places():
    """Ranks with equal places share a host, whose lowest rank leads it."""
    hosts = Hosts.of(["b", "a", "b", "a"])
    assert hosts == Hosts(((0, 2), (1, 3)))
    assert [hosts.leads(rank) for rank in range(4)] == [True, True, False, False]
    assert hosts.beside(3) == (1, 3)
