"""Lines about the time of a step beside FSDP1 and FSDP2, on the GPT of 1.3 billion parameters in bf16."""

import os

from tests.gpu.benchmark import ratio, require, run, step_ms
from tests.gpu.check import on_host

OURS = ("fairshard", "fairshard-fully-shard")
FSDP2, FSDP1 = ("fsdp2", "fsdp2-prefetch"), ("fsdp1", "fsdp1-prefetch")
TARGET = {1: 1.03, 2: 1.0}  # at world size 1 nothing is communicated: there is nothing to win, and little to lose
_SMALL = "--model gpt-5m --steps 4 --warmup 2 --repeat 1 --world 1"


def _flags(machine, engines, world, repeat):
    threads = max(1, len(os.sched_getaffinity(0)) // world)
    sizes = f"--model gpt-1.3b --steps 10 --warmup 3 --repeat {repeat} --world {world} --threads {threads}"
    return f"--device {machine.device} --precision bf16 --engines {engines} {_SMALL if machine.is_small else sizes}"


@on_host("step-time", "steps", timeout=270.0)
def step_time(machine, seconds):
    """A step of both doors takes at most 1.03 of FSDP2's and of FSDP1's on one device, and no more on several."""
    world = max(1, machine.num_devices)
    engines = ",".join((*OURS, "fsdp2", "fsdp1"))
    content = run("run.py", _flags(machine, engines, world, 2), machine.out / "steps.json", seconds)
    times = step_ms(content)
    peaks = {one["engine"]: max(rank["peak_bytes"] for rank in one["ranks"]) for one in content["runs"]}
    figures = {f"{engine} ms": value for engine, value in times.items()}
    figures |= {f"{engine} peak, bytes": value for engine, value in peaks.items()}
    figures |= {f"{engine} failed": reason for engine, reason in content["failures"].items()}
    _measured[machine] = content, times
    most = TARGET[min(world, 2)]
    targets = {f"{own} over FSDP2": (ratio(times, own, FSDP2), most) for own in OURS}
    targets |= {f"{own} over FSDP1": (ratio(times, own, FSDP1), most) for own in OURS}
    return require(targets, figures, machine.is_small, content["is_cut_off"])


@on_host("bench-doors", "steps", num_devices=2, timeout=200.0)
def bench_doors(machine, seconds):
    """`benchmarks/run.py` of both doors beside FSDP2: on one device, and where there are more, on all."""
    if machine in _measured:
        content, times = _measured[machine]
    else:
        content = run("run.py", _flags(machine, ",".join((*OURS, "fsdp2")), 1, 1), machine.out / "doors.json", seconds)
        times = step_ms(content)
    world = content["settings"]["world"]
    targets = {f"{own} over FSDP2": (ratio(times, own, FSDP2), TARGET[min(world, 2)]) for own in OURS}
    figures = {"ranks": world, **{f"{engine} ms": value for engine, value in times.items()}}
    return require(targets, figures, machine.is_small, content["is_cut_off"])


_measured = {}
