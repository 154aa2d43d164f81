"""Differences between CPU and CUDA: streams, events, memory figures. The only file that names ``torch.cuda``.

On CPU a stream is the program itself: entering one does nothing, and waiting for one returns immediately. Collectives,
which are asynchronous there too, are waited for through their `fairshard.utils.collectives.Transfer`.
"""

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_NOTHING = contextlib.nullcontext()
_CGROUP_CPUS = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_MEMORY = (  # version 2, version 1; "max" means no limit
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class Stream:
    """An ordered queue of work on one device, at a given priority (negative: sooner).

    Attributes:
        is_asynchronous: whether the queue is separate from the program itself.
    """

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._cuda = torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None
        self.is_asynchronous = self._cuda is not None

    @classmethod
    def of(cls, cuda: Any) -> "Stream":
        """Wrap the user's CUDA stream; None is the program itself."""
        stream = cls(torch.device("cpu"))
        stream._cuda = cuda
        stream.is_asynchronous = cuda is not None
        return stream

    def use(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which new work goes to this stream."""
        return _NOTHING if self._cuda is None else torch.cuda.stream(self._cuda)

    def wait(self, event: "Event") -> None:
        """Make work queued on this stream from now on start after ``event``."""
        if self._cuda is not None and event.cuda is not None:
            self._cuda.wait_event(event.cuda)

    def record(self) -> "Event":
        """Event that passes when all work queued on this stream so far is done."""
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

    def has_passed(self) -> bool:
        """Whether `synchronize` would return immediately."""
        return self.cuda is None or bool(self.cuda.query())

    def synchronize(self) -> None:
        """Make the host wait; afterwards it can read copies to host memory that were queued before the event."""
        if self.cuda is not None:
            self.cuda.synchronize()


_PASSED = Event()


def now(device: torch.device) -> Event:
    """Event that passes when all work queued on the current stream of ``device`` so far is done."""
    return Event(torch.cuda.current_stream(device).record_event()) if device.type == "cuda" else _PASSED


def default_device_type() -> str:
    """``"cuda"`` if a GPU can be used, otherwise ``"cpu"``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def current_device() -> torch.device:
    """The GPU that new CUDA tensors go to."""
    return torch.device("cuda", torch.cuda.current_device())


def gpus_in_use() -> list[torch.device]:
    """The GPU that new CUDA tensors go to, if this process has used any."""
    return [current_device()] if torch.cuda.is_initialized() else []


def device_count() -> int:
    """Number of GPUs that this process sees; 0 without CUDA."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def host_register(data: Tensor) -> bool:
    """Pin the memory of ``data``, which starts at a page, in place; False if the limit of locked memory is reached.

    `host_unregister` must be called before that memory is freed.
    """
    if int(torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.nbytes, 0)) == 0:
        return True
    with contextlib.suppress(RuntimeError):
        torch.zeros((), device="cuda")  # clears the error that CUDA keeps for the next launch
    return False


def host_unregister(address: int) -> None:
    """Undo `host_register` for memory that starts at ``address``."""
    torch.cuda.cudart().cudaHostUnregister(address)


def visible_cpus() -> int:
    """Number of CPUs this process may use, by its affinity mask and its control group's quota."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CGROUP_CPUS.read_text().split()
        return min(cpus, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or its quota is "max"
        return cpus


def free_host_memory() -> int:
    """Bytes that this process may still allocate: of the machine, or of its control group if less."""
    with open("/proc/meminfo") as file:
        entries = dict(line.split(":") for line in file)
    free = int(entries["MemAvailable"].split()[0]) * 1024
    for limit, used in _CGROUP_MEMORY:
        with contextlib.suppress(OSError, ValueError):
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
    return max(free, 0)


def set_device(device: torch.device) -> None:
    """Make ``device`` the current one of its type; no effect on CPU."""
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


def gpu_rng_state() -> Tensor | None:
    """State of the current GPU's random number generator; None without a GPU."""
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else None


def set_gpu_rng_state(saved: Tensor | None) -> None:
    """Restore the state, if there is a GPU and ``saved`` is not None."""
    if saved is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved)
