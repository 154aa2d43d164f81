"""What the units of one model share: streams, buckets, transfers, and when memory was last freed."""

from __future__ import annotations

import torch

from fairshard.params.shard_grad import GradTransfers
from fairshard.utils.buckets import Bucketer
from fairshard.utils.streams import Event, Stream, is_asynchronous, now


class Shared:
    """The streams, the bucketer and the transfers of the units that compute on ``device``.

    Attributes:
        free: the latest moment at which memory was freed; gathers wait for it.
        after_step: event recorded after the optimizer's step by the user; None: all work queued so far.
    """

    free = Event()
    after_step: Event | None = None

    def __init__(self, device: torch.device, bucket_cap_mb: float) -> None:
        self.device = device
        self.is_asynchronous = is_asynchronous(device)
        self.unshard_stream = Stream(device, priority=-1)
        self.reduce_stream = Stream(device, priority=-1)
        self.transfers = GradTransfers(device)
        self.bucketer = Bucketer(bucket_cap_mb, self.reduce_stream)

    def await_step(self) -> None:
        """Make gathers from now on wait for the optimizer's step, which runs on the current stream."""
        self.unshard_stream.wait(self.after_step or now(self.device))
        self.after_step = None

    def drop(self) -> None:
        """The model is dropped while work is queued: its memory is used again after that work."""
        for stream in (self.unshard_stream, self.reduce_stream):
            stream.record().wait()
        self.transfers.drop()

    def note_free(self) -> None:
        """Memory was freed: later gathers wait until compute has passed this moment."""
        if self.is_asynchronous:
            self.free = now(self.device)
        if torch.is_autocast_enabled(self.device.type):
            torch.clear_autocast_cache()  # it is keyed by tensor: the leaf would seem unchanged
