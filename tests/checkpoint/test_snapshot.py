"""Snapshots on their own, without a save."""

from unittest import mock

import torch

from fairshard.checkpoint import snapshot as snapshots
from fairshard.checkpoint.snapshot import Snapshot
from fairshard.utils.span_tensor import SpanTensor


def test_what_a_step_overwrites_is_copied_to_the_memory_of_the_save_before():
    """A snapshot of shards read in place keeps their values through a step; the next save reuses the copies' memory."""
    shards = [torch.arange(6.0), torch.arange(4.0)]
    buffers = {}
    addresses = []
    for written_in_time in (0, 1, 0):
        spans = [SpanTensor(shard, 0, shard.shape) for shard in shards]
        live = {shard.untyped_storage().data_ptr() for shard in shards}
        expected = [shard.clone() for shard in shards]
        snapshot = Snapshot(dict(enumerate(spans)), buffers, live)
        early = [snapshot.read(shard) for shard in shards[:written_in_time]]
        snapshot.copy_rest()
        for shard in shards:
            shard.add_(1)
        late = [snapshot.read(shard) for shard in shards[written_in_time:]]
        assert all(torch.equal(one, other) for one, other in zip([*early, *late], expected, strict=True))
        addresses.append([part.data_ptr() for part in late])
        snapshot.close()
    assert addresses[0] == addresses[2]
    assert addresses[1] == addresses[0][1:]


def test_copies_may_lie_anywhere_in_the_memory_that_is_kept():
    """Parts of a shard are read from its copy, also where the copy begins inside its storage."""
    kept = torch.zeros(11)
    shard = torch.arange(6.0)
    with mock.patch.object(snapshots, "host_empty_like", return_value=kept[5:]):
        snapshot = Snapshot({"all": SpanTensor(shard, 0, shard.shape)}, {}, live=set())
    shard_before = shard.clone()
    shard.zero_()
    assert torch.equal(snapshot.read(shard[2:4]), shard_before[2:4])
    assert torch.equal(snapshot.read(shard.view(2, 3)[1]), shard_before[3:])
    snapshot.close()
