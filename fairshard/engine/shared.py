"""What the units of one model share: streams, buckets, transfers, and when memory was last freed."""

from __future__ import annotations

import threading

import torch

from fairshard.params.gathered import CopyOuts
from fairshard.params.shard_grad import GradTransfers
from fairshard.utils.reduce_scatter_bucketer import ReduceScatterBucketer
from fairshard.utils.streams import Event, Stream, is_asynchronous, now


class Shared:
    """The streams, the bucketer and the transfers of the units that compute on ``device``.

    Attributes:
        free: the latest moment at which memory was freed; gathers wait for it.
        after_step: event recorded after the optimizer's step by the user; None: all work queued so far.
        depth: number of running calls of units, one inside the other.
    """

    def __init__(self, device: torch.device, bucket_cap_mb: float) -> None:
        self.device = device
        self._kind = device.type
        self._is_asynchronous = is_asynchronous(device)
        self.unshard_stream = Stream(device, priority=-1)
        self.reduce_stream = Stream(device, priority=-1)
        self.transfers = GradTransfers(device)
        self.copies = CopyOuts(device)
        self.bucketer = ReduceScatterBucketer(bucket_cap_mb, self.reduce_stream)
        self.free = Event()
        self.after_step: Event | None = None
        self.depth = 0
        self._thread = threading.get_ident()

    def await_step(self) -> None:
        """Make gathers from now on wait for the optimizer's step, which runs on the current stream."""
        self.unshard_stream.wait(self.after_step or now(self.device))

    @property
    def is_on_its_thread(self) -> bool:
        """Whether the calling thread is the one that ran the last forward."""
        return self._thread == threading.get_ident()

    def end_forward(self) -> None:
        """Note the thread, and free the buffer from which parameters were copied out last."""
        self._thread = threading.get_ident()
        if self._is_asynchronous:
            with self.unshard_stream.use():
                self.copies.free()

    def note_free(self) -> None:
        """Memory was freed: later gathers wait until compute has passed this moment."""
        if self._is_asynchronous:
            self.free = now(self.device)
        if self.depth and torch.is_autocast_enabled(self._kind):
            torch.clear_autocast_cache()  # it is keyed by tensor: the leaf would seem unchanged
