"""Streams and events of any device that works asynchronously: CUDA, ROCm, XPU, out-of-tree devices.

On CPU a stream is the program itself: entering one does nothing, and waiting for one returns immediately. Collectives,
which are asynchronous there too, are waited for through their `fairshard.utils.transfers.Transfer`.
"""

import contextlib
from typing import Any

import torch

_NOTHING = contextlib.nullcontext()


def is_asynchronous(device: torch.device) -> bool:
    """Whether work on ``device`` is queued on streams, and runs after the call that queued it has returned."""
    return device.type not in ("cpu", "meta")


class Stream:
    """An ordered queue of work on one device, at a given priority (negative: sooner); on CPU the program itself."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._real: Any = None
        if is_asynchronous(device):
            kind = getattr(torch.get_device_module(device.type), "Stream", torch.Stream)
            self._real = kind(device, priority=priority)

    def use(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which new work goes to this stream."""
        if self._real is None:
            return _NOTHING
        enter = getattr(torch.get_device_module(self._real.device.type), "stream", None)  # torch 2.6 needs it
        context: contextlib.AbstractContextManager[Any] = self._real if enter is None else enter(self._real)
        return context

    def wait(self, event: "Event") -> None:
        """Make work queued on this stream from now on start after ``event``."""
        if self._real is not None and event.real is not None:
            self._real.wait_event(event.real)

    def record(self) -> "Event":
        """Event that passes when all work queued on this stream so far is done."""
        return _PASSED if self._real is None else Event(self._real.record_event())


class Event:
    """A moment in a stream's work; on CPU it has always passed. ``real`` is the device's own event."""

    __slots__ = ("real",)

    def __init__(self, real: Any = None) -> None:
        self.real = real

    def wait(self) -> None:
        """Make the current stream of the event's device wait, never the host."""
        if self.real is not None:
            current_stream(self.real.device).wait_event(self.real)

    def is_completed(self) -> bool:
        """Whether `synchronize` would return immediately."""
        return self.real is None or bool(self.real.query())

    def synchronize(self) -> None:
        """Make the host wait; afterwards it can read copies to host memory that were queued before the event."""
        if self.real is not None:
            self.real.synchronize()


_PASSED = Event()


def now(device: torch.device) -> Event:
    """Event that passes when all work queued on the current stream of ``device`` so far is done."""
    return Event(current_stream(device).record_event()) if is_asynchronous(device) else _PASSED


def current_stream(device: torch.device) -> Any:
    """torch's own object for the stream on which work for ``device`` is queued."""
    return torch.get_device_module(device.type).current_stream(device)
