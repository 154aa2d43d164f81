"""What differs between CPU and CUDA: streams, memory figures. The only file that names ``torch.cuda``.

On CPU a stream is the program itself: entering one does nothing, waiting for one returns at once, and what is
asynchronous there (a collective) is waited for through its `fairshard.utils.collectives.Transfer`.
"""

import contextlib
import os
from typing import Any

import torch

_NOTHING = contextlib.nullcontext()


class Stream:
    """An ordered queue of work on one device, at a given priority (negative is sooner)."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._cuda = torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None

    def use(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which new work goes to this stream."""
        return _NOTHING if self._cuda is None else torch.cuda.stream(self._cuda)

    def wait(self, event: "Event") -> None:
        """Work given to this stream from now on starts after ``event``."""
        if self._cuda is not None and event.cuda is not None:
            self._cuda.wait_event(event.cuda)

    def record(self) -> "Event":
        """The moment when all work given to this stream so far is done."""
        return Event() if self._cuda is None else Event(self._cuda.record_event())


class Event:
    """A moment in a stream's work; on CPU it has always passed."""

    __slots__ = ("cuda",)

    def __init__(self, cuda: Any = None) -> None:
        self.cuda = cuda

    def wait(self) -> None:
        """Make the current stream wait, never the host."""
        if self.cuda is not None:
            torch.cuda.current_stream().wait_event(self.cuda)


_PASSED = Event()


def now(device: torch.device) -> Event:
    """The moment when all work given to the current stream of ``device`` so far is done."""
    return Event(torch.cuda.current_stream(device).record_event()) if device.type == "cuda" else _PASSED


def default_device_type() -> str:
    """``"cuda"`` where a GPU can be used, else ``"cpu"``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_count() -> int:
    """Number of GPUs that this process sees; 0 without CUDA."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def set_device(device: torch.device) -> None:
    """Make ``device`` the current one of its kind; nothing to do on CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def memory_allocated(device: torch.device) -> int:
    """Bytes held now: by tensors on CUDA, by the whole process (resident) on CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_memory(device: torch.device) -> int:
    """The most bytes held so far: by tensors on CUDA, by the whole process (resident) on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
