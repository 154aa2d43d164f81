"""Random nets of which ranks reach different parts train like one process that averages over the data of all ranks."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist

from tests.engine.random_nets import CAPS_MB, DOORS, draw, flat_groups, loss_of, shard, whole_state
from tests.on_ranks import in_full, on_ranks
from tests.reference import sgd

pytestmark = pytest.mark.behaviour("random nets")

TOLERANCE = 2e-6  # fp32 sums over three batches, in different orders, of numbers near 1


@contextlib.contextmanager
def naming(what):
    """Add ``what`` to the message of an exception raised inside."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error


def settings(seed):
    """One of `DOORS` and a bucket cap; any fifteen seeds in a row cover all pairs."""
    return DOORS[seed % len(DOORS)], CAPS_MB[seed // len(DOORS) % 3]


def set_mean_grads(net, keys, is_flat):
    """Set each gradient to the mean over ranks of that of the summed losses of ``keys``; None where no rank has one.

    A flat shard has one gradient: if any rank reaches any part of it, the parts that no rank reaches are zeros.
    """
    world_size = dist.get_world_size()
    for key in keys:
        for rank in range(world_size):
            loss_of(net, key, rank)[0].backward()
    for param in net.parameters():
        if param.grad is not None:
            param.grad /= world_size
    for group in flat_groups(net) if is_flat else ():
        if any(param.grad is not None for param in group):
            for param in group:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad


def train(seed, checkpoints=False, num_steps=3):
    """Train the net of ``seed``, plain and sharded with its `settings`; all parameters agree."""
    door, cap = settings(seed)
    plain = draw(seed, checkpoints)
    wrapped = shard(copy.deepcopy(plain), door, bucket_cap_mb=cap)
    of_plain, of_wrapped = sgd(plain), sgd(wrapped)
    for step in range(num_steps):
        key = seed, step
        set_mean_grads(plain, [key], door == "wrapper")
        loss, unused = loss_of(wrapped, key)
        loss.backward()
        del loss, unused
        for optimizer in (of_plain, of_wrapped):
            optimizer.step()
            optimizer.zero_grad()
    state = whole_state(wrapped)
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(
            state[name], expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )


def train_all(seeds, checkpoints=False):
    for seed in seeds:
        with naming(f"net {seed} ({', '.join(map(str, settings(seed)))})"):
            train(seed, checkpoints)


@on_ranks(2)
def test_nets_on_two_ranks():
    """Twenty nets: all doors and caps, experts in units and units as experts, towers, heads, modules called twice."""
    train_all(range(20))


@on_ranks(in_full(3), in_full(4))
def test_nets_on_more_ranks():
    """Ten other nets for each world size: a gradient that only one rank has is averaged over all ranks."""
    first = 100 * dist.get_world_size()
    train_all(range(first, first + 10))


@on_ranks(in_full(2), 3)
def test_nets_with_checkpoints():
    """With checkpoints of both kinds over one or several stages, a rank recomputes more than it reaches."""
    first = 600 + 20 * dist.get_world_size()
    train_all(range(first, first + 10), checkpoints=True)


@on_ranks(in_full(2), in_full(3), in_full(4), timeout=500.0)
def test_many_nets():
    """The same for 84 more nets on each number of ranks, half of them with checkpoints."""
    first = 1000 * dist.get_world_size()
    train_all(range(first, first + 42))
    train_all(range(first + 100, first + 142), checkpoints=True)
