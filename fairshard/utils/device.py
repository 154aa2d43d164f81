"""What differs between CPU and CUDA: streams, memory figures. The only file that names ``torch.cuda``.

On CPU a stream is the program itself: entering one does nothing, waiting for one returns at once, and what is
asynchronous there (a collective) is waited for through its `fairshard.utils.collectives.Transfer`.
"""

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_NOTHING = contextlib.nullcontext()
_CGROUP_CPUS = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_MEMORY = (  # version 2, version 1; "max" is no number, and means no limit
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class Stream:
    """An ordered queue of work on one device, at a given priority (negative is sooner)."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._cuda = torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None

    @classmethod
    def of(cls, cuda: Any) -> "Stream":
        """The user's own CUDA stream; of None that of the program."""
        stream = cls(torch.device("cpu"))
        stream._cuda = cuda
        return stream

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

    def has_passed(self) -> bool:
        """Whether `synchronize` would return at once."""
        return self.cuda is None or bool(self.cuda.query())

    def synchronize(self) -> None:
        """Make the host wait: afterwards what was copied to host memory before this moment can be read there."""
        if self.cuda is not None:
            self.cuda.synchronize()


_PASSED = Event()


def now(device: torch.device) -> Event:
    """The moment when all work given to the current stream of ``device`` so far is done."""
    return Event(torch.cuda.current_stream(device).record_event()) if device.type == "cuda" else _PASSED


def default_device_type() -> str:
    """``"cuda"`` where a GPU can be used, else ``"cpu"``."""
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
    """Pin the memory of ``data``, which starts at a page, as it is; False where the limit of locked memory is hit.

    `host_unregister` must be called before that memory is freed.
    """
    if int(torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.nbytes, 0)) == 0:
        return True
    with contextlib.suppress(RuntimeError):
        torch.zeros((), device="cuda")  # takes the error that CUDA keeps for the next launch
    return False


def host_unregister(address: int) -> None:
    """Undo `host_register` for memory that starts at ``address``."""
    torch.cuda.cudart().cudaHostUnregister(address)


def visible_cpus() -> int:
    """CPUs this process may run on: its affinity mask, and the control group's quota where there is one."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CGROUP_CPUS.read_text().split()
        return min(cpus, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or its quota is "max"
        return cpus


def free_host_memory() -> int:
    """Bytes that this process may still take: of the machine, or of its control group where that is less."""
    with open("/proc/meminfo") as file:
        entries = dict(line.split(":") for line in file)
    free = int(entries["MemAvailable"].split()[0]) * 1024
    for limit, used in _CGROUP_MEMORY:
        with contextlib.suppress(OSError, ValueError):
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
    return max(free, 0)


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


def gpu_rng_state() -> Tensor | None:
    """The random number generator of the current GPU; None without one."""
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else None


def set_gpu_rng_state(saved: Tensor | None) -> None:
    """Set it, if there is a GPU and a state for it."""
    if saved is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved)
