"""Random nets of which ranks reach different parts train as one process does that averages over all ranks' data."""

import contextlib
import copy

import torch
import torch.distributed as dist

from tests.engine.random_nets import CAPS_MB, DOORS, draw, flat_groups, loss_of, shard, whole_state
from tests.on_ranks import in_full, on_ranks
from tests.reference import sgd

TOLERANCE = 2e-6  # the order of sums over three batches, in fp32, of numbers near 1


@contextlib.contextmanager
def naming(what):
    """An exception inside says ``what`` it is about."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error


def settings(seed):
    """A door and a cap of buckets; twelve seeds in a row have all pairs."""
    return DOORS[seed % 4], CAPS_MB[seed // 4 % 3]


def set_mean_grads(net, keys, is_flat):
    """The mean over ranks of the gradients of the sum over ``keys``; None where no rank has one.

    A flat shard has one gradient: zeros for what no rank reaches of it, if any rank reaches any of it.
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
    """Train the net of ``seed``, sharded as its seed says, and plain; all parameters agree."""
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


@on_ranks(3, 4)
def test_nets_on_more_ranks():
    """Ten nets each, of other seeds: what reaches a parameter on one rank of several is averaged over all."""
    first = 100 * dist.get_world_size()
    train_all(range(first, first + 10))


@on_ranks(2, 3)
def test_nets_with_checkpoints():
    """Checkpoints of both kinds over one stage and several: a rank recomputes more than it reaches."""
    first = 600 + 20 * dist.get_world_size()
    train_all(range(first, first + 10), checkpoints=True)


@on_ranks(in_full(2), in_full(3), in_full(4), timeout=500.0)
def test_many_nets():
    """As above, for some eighty nets more on each number of ranks, half of them with checkpoints."""
    first = 1000 * dist.get_world_size()
    train_all(range(first, first + 42))
    train_all(range(first + 100, first + 142), checkpoints=True)
