"""The host of this process: its CPUs and its memory."""

import contextlib
import os
import resource
from pathlib import Path

_CGROUP_CPUS = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_MEMORY = (  # version 2, version 1; "max" means no limit
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


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


def resident_memory() -> int:
    """Bytes of memory that this process holds now."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_memory() -> int:
    """The most bytes of memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
