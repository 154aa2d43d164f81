"""What the units of one model share: streams, buckets, transfers, and when memory was last freed."""

from __future__ import annotations

import torch

from fairshard.params.shard_grad import GradTransfers
from fairshard.utils.device import Event, Stream, now
from fairshard.utils.reduce_scatter_bucketer import ReduceScatterBucketer


class Shared:
    """The streams, the bucketer and the transfers of the units that compute on ``device``.

    Attributes:
        free: the latest moment at which memory was freed; gathers wait for it.
        depth: number of running calls of units, one inside the other.
    """

    def __init__(self, device: torch.device, bucket_cap_mb: float) -> None:
        self.device = device
        self._kind = device.type
        self.unshard_stream = Stream(device, priority=-1)
        self.reduce_stream = Stream(device, priority=-1)
        self.transfers = GradTransfers(device)
        self.bucketer = ReduceScatterBucketer(bucket_cap_mb, self.reduce_stream)
        self.free: Event = now(device)
        self.depth = 0

    def note_free(self) -> None:
        """Memory was freed: later gathers wait until compute has passed this moment."""
        if self._kind == "cuda":
            self.free = now(self.device)
        if self.depth and torch.is_autocast_enabled(self._kind):
            torch.clear_autocast_cache()  # it is keyed by tensor: the leaf would seem unchanged
