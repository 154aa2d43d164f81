"""The counters of copies and collectives count what they claim to."""

import pytest
import torch
import torch.distributed as dist

from tests.kit import CollectiveCounter, CopyCounter, fake_group
from tests.on_ranks import on_ranks


def test_copies_are_counted_in_number_and_bytes():
    """Each copying operator adds one call and the bytes that it writes, also inside a backward."""
    a, b = torch.zeros(3), torch.ones(3)
    with CopyCounter() as copies:
        a.copy_(b)
        torch._foreach_copy_([a, b], [b, a])
        torch.cat([a, b])
        a.clone()
        a.to(torch.bfloat16)
        a.add_(1)
    assert copies.counts == {"copy_": 1, "_foreach_copy_": 1, "cat": 1, "clone": 1, "_to_copy": 1}
    assert copies.nbytes == {"copy_": 12, "_foreach_copy_": 24, "cat": 24, "clone": 12, "_to_copy": 6}
    assert copies.total_nbytes() == 78


def test_copies_made_by_autograd_are_counted():
    """A gradient that autograd must clone is counted."""
    weight = torch.ones(5, requires_grad=True)
    loss = weight.sum()  # its gradient is an expanded scalar: accumulating it makes a copy
    with CopyCounter() as copies:
        loss.backward()
    assert sum(copies.counts.values()) == 1
    assert copies.total_nbytes() == weight.nbytes


@pytest.mark.cpu_only("on a device the receive of both ranks would block their sends, which are behind it")
@on_ranks(2)
def test_collectives_are_counted_below_torch_distributed():
    """Both the functions of torch.distributed and methods called on the group itself are seen, with bytes."""
    other = 1 - dist.get_rank()
    with CollectiveCounter() as collectives:
        dist.all_reduce(torch.ones(3))
        works = [dist.irecv(torch.ones(5), other), dist.isend(torch.ones(5), other)]
        for work in works:
            work.wait()
        dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(4))
        dist.group.WORLD.allreduce([torch.ones(2)]).wait()
    assert collectives.calls == [
        ("allreduce", 12),
        ("recv", 20),
        ("send", 20),
        ("allgather", 16),
        ("allreduce", 8),
    ]
    assert collectives.count("send", "recv") == 2
    assert collectives.nbytes("allreduce") == 20
    dist.all_reduce(torch.ones(3))
    assert len(collectives.calls) == 5


def test_fake_group_moves_nothing():
    """A fake group has any size and its collectives return immediately; afterwards there is no group."""
    with fake_group(64, rank=3):
        assert (dist.get_rank(), dist.get_world_size()) == (3, 64)
        value = torch.ones(2)
        dist.all_reduce(value)
        assert value.tolist() == [1, 1]
    assert not dist.is_initialized()
