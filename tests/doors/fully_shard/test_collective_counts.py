"""A step gathers and reduces as often as ``reshard_after_forward`` and ``bucket_cap_mb`` say."""

import contextlib
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from fairshard.nn import FSDPModule, fully_shard
from fairshard.utils import collectives, groups
from fairshard.utils.collectives import counters, reset_counters
from tests.kit import rank_device
from tests.models import DIM, Block
from tests.on_ranks import in_full, on_ranks
from tests.reference import randn

pytestmark = pytest.mark.behaviour("collective counts of fully_shard")

NUM_BLOCKS = 3
NUM_UNITS = NUM_BLOCKS + 1


def outermost():
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))


def sharded(reshard_after_forward=None, bucket_cap_mb=0):
    """Blocks that are one unit each, with a Linear before and after them in the outermost unit."""
    torch.manual_seed(1)
    how = {"reshard_after_forward": reshard_after_forward, "bucket_cap_mb": bucket_cap_mb, "order_check": "off"}
    first, last, *blocks = (part.to(rank_device()) for part in (*outermost(), *(Block() for _ in range(NUM_BLOCKS))))
    return fully_shard(nn.Sequential(first, *(fully_shard(block, **how) for block in blocks), last), **how)


@contextlib.contextmanager
def native_collectives():
    """Use the backend's own all-gather and reduce-scatter, even with gloo, because torch counts only those."""
    own = weakref.WeakKeyDictionary()
    with (
        mock.patch.object(collectives, "communicators", own),
        mock.patch.object(groups, "communicators", own),
        mock.patch.object(groups, "backend_name", return_value="its own"),
    ):
        yield


@pytest.fixture(params=[False, True], ids=["messages", "native"])
def is_native(request):
    """Whether to use the backend's own collectives."""
    return request.param


def counts_of(call, is_native):
    """(gathers, reductions) of ``call``, and its result; if ``is_native``, checks that torch counts the same."""
    reset_counters()
    with CommDebugMode() as torchs:
        result = call()
    gathers, reduces, messages = (
        counters().get(kind, (0,))[0] for kind in ("all_gather", "reduce_scatter", "agreement")
    )
    if is_native:
        found, c10d = torchs.get_comm_counts(), torch.ops.c10d
        assert found.get(c10d._allgather_base_, 0) == gathers + messages
        assert found.get(c10d._reduce_scatter_base_, 0) == reduces
    return (gathers, reduces), result


def counts_of_a_step(model, is_native=False, between=lambda: None):
    """(gathers, reductions) of forward and of backward in the third step, after ranks have compared their units."""
    with native_collectives() if is_native else contextlib.nullcontext():
        for _ in range(3):
            forward, loss = counts_of(lambda: model(randn(4, DIM)).sum(), is_native)
            between()
            backward, _ = counts_of(loss.backward, is_native)
    return forward, backward


@on_ranks(2, in_full(4))
def test_reshard_after_forward_says_what_the_backward_gathers(is_native):
    """Forward gathers every unit, backward those that forward freed; None keeps the outermost unit, True does not."""
    for reshard, expected in {True: NUM_UNITS, False: 0, 2: NUM_UNITS, None: NUM_BLOCKS}.items():
        found = counts_of_a_step(sharded(reshard), is_native)
        assert found == ((NUM_UNITS, 0), (expected, NUM_UNITS)), reshard


@on_ranks(2, in_full(4))
def test_what_was_freed_by_hand_is_gathered_again(is_native):
    """With ``reshard_after_forward=False``, ``reshard()`` after the forward costs the backward one gather per unit."""
    model = sharded(False)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    assert len(units) == NUM_UNITS
    found = counts_of_a_step(model, is_native, lambda: [unit.reshard() for unit in units])
    assert found == ((NUM_UNITS, 0), (NUM_UNITS, NUM_UNITS))


@on_ranks(2, in_full(4))
def test_set_reshard_after_forward_is_as_if_it_had_been_passed(is_native):
    """With ``recurse`` the value applies to all units, otherwise to the outermost unit only."""
    gathered_again = {  # by value and `recurse`
        (True, True): NUM_UNITS,
        (True, False): 1,
        (False, True): 0,
        (False, False): NUM_BLOCKS,
    }
    for (value, recurse), expected in gathered_again.items():
        model = sharded(not value)
        model.set_reshard_after_forward(value, recurse=recurse)
        found = counts_of_a_step(model, is_native)
        assert found == ((NUM_UNITS, 0), (expected, NUM_UNITS)), (value, recurse)


@on_ranks(2)
def test_gradients_of_several_units_travel_together():
    """Small gradients share one bucket by default; a cap limits its size, and a cap of 0 sends each unit alone.

    Sharded by rows, each parameter is padded to the same number of rows on every rank.
    """
    world_size = dist.get_world_size()
    nbytes = [sum(padded_nbytes(param, world_size) for param in part.parameters()) for part in (Block(), outermost())]
    two_blocks = 2 * nbytes[0] / 2**20
    # The backward reaches the blocks first, then the outermost unit, which is smaller and fits beside a block.
    assert nbytes[1] < nbytes[0]
    for cap, expected in ((25, 1), (two_blocks, 2), (two_blocks - 1 / 2**20, NUM_BLOCKS), (0, NUM_UNITS)):
        assert counts_of_a_step(sharded(True, cap))[1] == (NUM_UNITS, expected), cap


def padded_nbytes(param, world_size):
    """Bytes of a parameter whose rows are padded to a multiple of the number of ranks."""
    return -(-param.size(0) // world_size) * world_size * param[0].numel() * param.itemsize


@on_ranks(2)
@pytest.mark.parametrize("cap", [0, 25])
def test_accumulation_sends_nothing(cap):
    """With ``set_requires_gradient_sync(False)`` parameters are gathered as usual, and no gradient is sent."""
    model = sharded(True, cap)
    model.set_requires_gradient_sync(False)
    assert counts_of_a_step(model) == ((NUM_UNITS, 0), (NUM_UNITS, 0))
    model.set_requires_gradient_sync(True)
    assert counts_of_a_step(model)[1] == (NUM_UNITS, 1 if cap else NUM_UNITS)
