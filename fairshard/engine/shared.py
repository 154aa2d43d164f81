"""State that the units of one model share: streams, buckets, transfers, and when memory was last freed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

import torch

from fairshard.errors import TrainingStateError
from fairshard.params.gathered import CopyOuts, Gathered
from fairshard.params.shard_grad import GradTransfers
from fairshard.utils.autograd import NO_BACKWARD, current_task
from fairshard.utils.buckets import Bucketer
from fairshard.utils.streams import Event, Stream, current_stream, is_asynchronous, now


class Shared:
    """The streams, the bucketer and the transfers of the units that compute on ``device``.

    Attributes:
        free: the latest moment at which memory was freed; gathers wait for it.
        after_step: event recorded after the optimizer's step by the user; None: all work queued so far.
        depth: number of running calls of units, one inside the other.
        is_split: units compute on several streams of the user.
    """

    def __init__(self, device: torch.device, bucket_cap_mb: float) -> None:
        self.device = device
        self._kind = device.type
        self.is_asynchronous = is_asynchronous(device)
        self.unshard_stream = Stream(device, priority=-1)
        self.reduce_stream = Stream(device, priority=-1)
        self.transfers = GradTransfers(device)
        self.copies = CopyOuts(device)
        self.bucketer = Bucketer(bucket_cap_mb, self.reduce_stream)
        self.free = Event()
        self.after_step: Event | None = None
        self.depth = 0
        self._thread = threading.get_ident()
        self._running: dict[str, int] = {}  # the thread that is in a forward; `setdefault` is atomic
        self.is_split = False
        self._computing = [current_stream(device)] if self.is_asynchronous else []  # streams on which units compute

    def await_step(self) -> None:
        """Make gathers from now on wait for the optimizer's step, which runs on the current stream."""
        self.unshard_stream.wait(self.after_step or now(self.device))

    @property
    def is_on_its_thread(self) -> bool:
        """Whether the calling thread is the one that ran the last forward."""
        return self._thread == threading.get_ident()

    def take_thread(self, fqn: str) -> bool:
        """Take the model for the calling thread, before unit ``fqn`` is called; returns whether it was free until now.

        The call that got it while it was free calls `leave_thread` at its end.

        Raises:
            TrainingStateError: see `check_thread`.
        """
        was_free = not self._running
        if self._running.setdefault("thread", own := threading.get_ident()) != own:
            self.check_thread(fqn)
        return was_free

    def check_thread(self, fqn: str) -> None:
        """Raise if another thread is in a forward: one of the two would free units under the other.

        A backward may recompute units on a thread of its own while the forward that called it waits.

        Raises:
            TrainingStateError: another thread is in a forward.
        """
        own = threading.get_ident()
        if self._running.get("thread", own) != own and current_task() == NO_BACKWARD:
            raise TrainingStateError(
                "A sharded model must run on one thread at a time, because ranks gather its units in one order, but "
                f"unit `{fqn or 'root'}` was called on thread {threading.current_thread().name} while another thread "
                "is in a forward of the model. Call the model from one thread, or under a lock that all ranks take in "
                "one order."
            )

    def leave_thread(self) -> None:
        """The call is over: any thread may take the model."""
        self._running.clear()

    def end_forward(self) -> None:
        """Note the thread, and free the buffer from which parameters were copied out last."""
        self._thread = threading.get_ident()
        if self.is_asynchronous:
            with self.unshard_stream.use():
                self.copies.free()

    def note_stream(self) -> None:
        """A call of a unit begins, on the current stream of a device that is asynchronous."""
        if (current := current_stream(self.device)) not in self._computing:
            for stream in self._computing:  # they have waited for what is gathered now
                Stream.of(stream).record().wait()
            self._computing.append(current)
            self.is_split = True

    def await_gathers(self, under_way: Sequence[Gathered]) -> None:
        """Make all streams on which units compute wait for these gathers: a unit may be used on each of them."""
        with self.unshard_stream.use():
            for gathered in under_way:
                gathered.wait()
        arrived = self.unshard_stream.record()
        for stream in self._computing:
            Stream.of(stream).wait(arrived)

    def at_home(self, returns: bool = False) -> contextlib.AbstractContextManager[None]:
        """A context for work with leaves and their gradients: on one stream, on whatever streams units compute.

        Autograd has the gradient of a leaf ready on the stream on which the leaf's node was made. ``returns``: the
        current stream then waits for that work, also after an exception.
        """
        if not self.is_asynchronous or current_stream(self.device) == self._computing[0]:
            return _HERE
        home = Stream.of(self._computing[0])
        return home.in_turn(self.device) if returns else home.use()

    def note_free(self) -> None:
        """Memory was freed: later gathers wait until compute has passed this moment, on every stream."""
        if self.is_asynchronous:
            self.free = now(self.device)
            for stream in self._computing if self.is_split else ():
                self.unshard_stream.wait(Stream.of(stream).record())
        if self.depth and torch.is_autocast_enabled(self._kind):
            torch.clear_autocast_cache()  # it is keyed by tensor: the leaf would seem unchanged


_HERE = contextlib.nullcontext()
