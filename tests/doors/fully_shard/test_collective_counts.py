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
from fairshard.utils.testing import rank_device
from tests.models import DIM, Block
from tests.on_ranks import in_full, on_ranks
from tests.reference import randn

NUM_BLOCKS = 3
NUM_UNITS = NUM_BLOCKS + 1


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


class Counts:
    """Counts all-gathers and reduce-scatters in a context; if ``is_native``, checks that torch counts the same."""

    def __init__(self, is_native):
        self._is_native = is_native

    def __enter__(self):
        reset_counters()
        self._torchs = CommDebugMode()
        self._torchs.__enter__()
        return self

    def __exit__(self, *exception):
        self._torchs.__exit__(*exception)
        self.gathers, self.reduces = (counters().get(kind, (0,))[0] for kind in ("all_gather", "reduce_scatter"))
        messages = counters().get("agreement", (0,))[0]
        if self._is_native:
            found = self._torchs.get_comm_counts()
            c10d = torch.ops.c10d
            assert found.get(c10d._allgather_base_, 0) == self.gathers + messages
            assert found.get(c10d._reduce_scatter_base_, 0) == self.reduces


def counts_of_a_step(model, is_native, between=lambda: None):
    """(gathers, reductions) of forward and of backward in the third step, after ranks have compared their units."""
    for _ in range(3):
        with Counts(is_native) as forward:
            loss = model(randn(4, DIM)).sum()
        between()
        with Counts(is_native) as backward:
            loss.backward()
    return (forward.gathers, forward.reduces), (backward.gathers, backward.reduces)


def both_ways():
    """Pairs of (whether to use the backend's own collectives, the context that does it)."""
    return [(False, contextlib.nullcontext()), (True, native_collectives())]


@on_ranks(2, in_full(4))
def test_reshard_after_forward_says_what_the_backward_gathers():
    """Forward gathers every unit, backward those that forward freed; None keeps the outermost unit, True does not."""
    gathered_again = {True: NUM_UNITS, False: 0, 2: NUM_UNITS, None: NUM_BLOCKS}
    for is_native, way in both_ways():
        with way:
            for reshard, expected in gathered_again.items():
                found = counts_of_a_step(sharded(reshard), is_native)
                assert found == ((NUM_UNITS, 0), (expected, NUM_UNITS)), reshard


@on_ranks(2, in_full(4))
def test_what_was_freed_by_hand_is_gathered_again():
    """With ``reshard_after_forward=False``, ``reshard()`` after the forward costs the backward one gather per unit."""
    for is_native, way in both_ways():
        with way:
            model = sharded(False)
            units = [module for module in model.modules() if isinstance(module, FSDPModule)]
            assert len(units) == NUM_UNITS

            def free(units=units):
                for unit in units:
                    unit.reshard()

            assert counts_of_a_step(model, is_native, free) == ((NUM_UNITS, 0), (NUM_UNITS, NUM_UNITS))


@on_ranks(2, in_full(4))
def test_set_reshard_after_forward_is_as_if_it_had_been_passed():
    """With ``recurse`` the value applies to all units, otherwise to the outermost unit only."""
    gathered_again = {  # by value and `recurse`; value None: not set
        (True, True): NUM_UNITS,
        (True, False): 1,
        (False, True): 0,
        (False, False): NUM_BLOCKS,
        (None, True): NUM_BLOCKS,
        (None, False): NUM_BLOCKS,
    }
    for is_native, way in both_ways():
        with way:
            for (value, recurse), expected in gathered_again.items():
                model = sharded(None if value is None else not value)
                if value is not None:
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
        assert counts_of_a_step(sharded(True, cap), False)[1] == (NUM_UNITS, expected), cap


def padded_nbytes(param, world_size):
    """Bytes of a parameter whose rows are padded to a multiple of the number of ranks."""
    return -(-param.size(0) // world_size) * world_size * param[0].numel() * param.itemsize


def outermost():
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))


@on_ranks(2)
@pytest.mark.parametrize("cap", [0, 25])
def test_accumulation_sends_nothing(cap):
    """With ``set_requires_gradient_sync(False)`` parameters are gathered as usual, and no gradient is sent."""
    model = sharded(True, cap)
    model.set_requires_gradient_sync(False)
    assert counts_of_a_step(model, False) == ((NUM_UNITS, 0), (NUM_UNITS, 0))
    model.set_requires_gradient_sync(True)
    assert counts_of_a_step(model, False)[1] == (NUM_UNITS, 1 if cap else NUM_UNITS)
