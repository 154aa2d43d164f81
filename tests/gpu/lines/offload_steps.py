"""Lines about offloaded steps with exact clipping, on the GPT of 1.3 billion parameters in bf16."""

import os

from tests.gpu.benchmark import ratio, require, run, variant_ms
from tests.gpu.check import Missed, on_host

_SMALL = "--model gpt-5m --steps 5 --repeat 1 --world 1"


def _flags(machine, variants, steps, accumulate=1):
    world = max(1, machine.num_devices)
    threads = max(1, len(os.sched_getaffinity(0)) // world)
    sizes = f"--model gpt-1.3b --steps {steps} --repeat 1 --world {world} --threads {threads} --timeout 120"
    flags = f"--device {machine.device} --variants {variants} --accumulate {accumulate}"
    return f"{flags} {_SMALL if machine.is_small else sizes}"


@on_host("offload-bench", "offload", timeout=200.0)
def offload_bench(machine, seconds):
    """At 8 K tokens a step: offload at most 0.60 of FSDP2's, 1.15 of the bandwidths; no offload 1.03 of PyTorch."""
    variants = "none,offload,overlap,fsdp2,plain"
    content = run("offload.py", _flags(machine, variants, 7), machine.out / "offload.json", seconds)
    times = variant_ms(content)
    figures = {f"{name} ms": value for name, value in times.items()}
    figures |= {f"{name} failed": reason for name, reason in content["failures"].items()}
    for one in content["runs"]:
        figures[f"{one['variant']} peak, bytes"] = max(rank["peak_bytes"] for rank in one["ranks"])
        if one["ranks"][0]["idle"] is not None:
            figures[f"{one['variant']} share of idle device"] = round(one["ranks"][0]["idle"], 3)
    targets = {
        "offload over FSDP2": (ratio(times, "offload", ("fsdp2",)), 0.60),
        "overlap over FSDP2": (ratio(times, "overlap", ("fsdp2",)), 0.60),
        "no offload over PyTorch": (ratio(times, "none", ("plain",)), 1.03),
    }
    limits = next((one["ranks"][0]["limits"] for one in content["runs"] if one["ranks"][0]["limits"]), {})
    figures |= {name: round(value, 3) for name, value in limits.items()}
    bounds = [1e3 * value for name, value in limits.items() if name.endswith(")") and " s a step" in name]
    if bounds and "none" in times:
        largest = max(times["none"], *bounds)
        targets["overlap over the largest bound"] = (round(times.get("overlap", 0) / largest, 3), 1.15)
    return require(targets, figures, machine.is_small, content["is_cut_off"])


@on_host("clip-mode", "offload", timeout=100.0)
def clip_mode(machine, seconds):
    """Milliseconds of a step after the backward, which clips, and of one during it, which does not."""
    content = run("offload.py", _flags(machine, "none,offload,overlap", 6), machine.out / "clip-mode.json", seconds)
    times = variant_ms(content)
    missing = {"offload", "overlap"} - times.keys()
    if missing:
        cut = ", cut off by its limit" * content["is_cut_off"]
        raise Missed(f"not measured: {', '.join(sorted(missing))}{cut}", {**times, **content["failures"]})
    return {"wait ms": times["offload"], "early ms": times["overlap"]}


@on_host("offload-bench-64k", "offload", timeout=130.0)
def offload_bench_64k(machine, seconds):
    """At 64 K tokens a step (``--accumulate 8``) an offloaded step takes at most 1.25 of one without offload."""
    content = run(
        "offload.py", _flags(machine, "none,offload,overlap", 5, 2 if machine.is_small else 8),
        machine.out / "offload-64k.json", seconds,
    )  # fmt: skip
    times = variant_ms(content)
    best = min((times[name] for name in ("offload", "overlap") if name in times), default=0.0)
    targets = {"offload over none": (round(best / times["none"], 3) if "none" in times else None, 1.25)}
    figures = {f"{name} ms": value for name, value in times.items()}
    return require(targets, figures, machine.is_small, content["is_cut_off"])
