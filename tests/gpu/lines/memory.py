"""Lines about peak memory against the plan's formula, and traces of a step."""

import functools
import gzip
import shutil
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from fairshard.cli.gpt import GPT, Block, GPTConfig
from fairshard.extras.planning.peak import ON_WAY
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn.wrap import ModuleWrapPolicy, describe
from tests.gpu.check import SIMULATED, Missed, NotHere, on_host, on_ranks
from tests.gpu.training import Way, batches, build, optimizer_of
from tests.kit import rank_device
from tests.kit.rank_pool import RankPool

SIZES = {
    True: GPTConfig(layers=4, dim=256, heads=4, context=16),
    False: GPTConfig(layers=8, dim=2048, heads=16, context=64),
}
POLICY = ModuleWrapPolicy({Block})
CASES = {
    "fp32": {},
    "bf16": {"mixed_precision": True, "compute_dtype": torch.bfloat16},
    "offload": {"cpu_offload": True},
    "bf16, offload": {"mixed_precision": True, "compute_dtype": torch.bfloat16, "cpu_offload": True},
}
TOLERANCE = 0.1
"""The plan is a formula, and allocators of real devices round blocks up."""


def _peak(sizes, options):
    """Bytes at the peak of later steps' forward and backward, beyond those before the model was built."""
    module, here = torch.get_device_module(rank_device().type), rank_device()
    warm = torch.ones(64, 64, device=here, requires_grad=True)
    (warm @ warm).sum().backward()  # libraries allocate their workspaces
    with torch.autocast(here.type, torch.bfloat16):
        (warm @ warm).sum().backward()
    del warm
    module.synchronize()
    before = module.memory_allocated()
    with torch.device("cpu"):
        plain = GPT(sizes)
    model = FSDP(plain, auto_wrap_policy=POLICY, device_id=torch.device(here.type, module.current_device()), **options)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.randint(256, (1, 2), device="cpu").to(here)  # their activations are nothing beside the weights
    peak = 0
    for step in range(3):
        module.reset_peak_memory_stats()
        model(tokens).float().square().mean().backward()
        module.synchronize()
        if step:
            peak = max(peak, module.max_memory_allocated() - before)
        optimizer.step()
        optimizer.zero_grad()
    return peak


@on_ranks("peak-formula", part="memory", timeout=90.0)
def peak_formula(is_small):
    """The peak of a step is that of `describe` for the same model, within 10 %.

    A device that copies fast may hold none of the gradients on their way to the host.
    """
    sizes, figures, missed = SIZES[is_small], {}, []
    for name, options in CASES.items():
        with torch.device("meta"):
            plain = GPT(sizes)
        ranks = torch.distributed.get_world_size()
        plan = describe(plain, POLICY, ranks, optimizer="adamw", device=rank_device().type, **options)
        peak = _peak(sizes, options)
        on_way = 0 if is_small else sum(term.nbytes for term in plan.terms if term.name == ON_WAY)
        off = max(peak - plan.peak_nbytes, plan.peak_nbytes - on_way - peak) / plan.peak_nbytes
        terms = ", ".join(f"{term.name} {term.nbytes}" for term in plan.terms if not term.on_host)
        figures[f"{name}: bytes at the peak"] = f"{peak} measured, {plan.peak_nbytes} predicted ({terms})"
        if off > TOLERANCE:
            missed.append(f"{name} is off by {off:.1%}")
    if missed:
        raise Missed("; ".join(missed), figures)
    return figures


def traced(way, folder):
    """A trace of the third step of ``way`` in ``folder``, and the share of that step in which the device was busy."""
    kinds = [ProfilerActivity.CPU]
    if rank_device().type != "cpu" and rank_device().type != SIMULATED:
        kinds.append(getattr(ProfilerActivity, rank_device().type.upper()))
    model = build(way)
    optimizer = optimizer_of(way, model)
    module = torch.get_device_module(rank_device().type)
    for index, each in enumerate(batches(3)):
        if index == 2:
            module.synchronize()
            found = profile(activities=kinds)
            found.start()
        model(each).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    module.synchronize()
    found.stop()
    found.export_chrome_trace(str(Path(folder, "trace.json")))
    events = [event for event in found.events() if event.device_type != torch.autograd.DeviceType.CPU]
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    busy = reached = 0.0
    for begin, end in spans:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    whole = reached - spans[0][0] if spans else 0.0
    return {"device busy, share of its span": round(busy / whole, 3) if whole else 0.0, "events": len(found.events())}


@on_host("traces", "memory", timeout=60.0)
def traces(machine, seconds):
    """Traces of a step, one on the device and one offloaded, lie beside the report as ``trace-*.json.gz``."""
    if machine.device == "cpu":
        raise NotHere("the CPU has no streams to trace")
    pool = RankPool(machine.device)
    figures = {}
    if machine.device == SIMULATED:
        from tests.sim.ranks import watched

        pool.around = functools.partial(watched, 0)
    try:
        for name, way in {
            "device": Way(low=torch.bfloat16),
            "offload": Way(placement="offload", optimizer="cpu"),
        }.items():
            with tempfile.TemporaryDirectory() as folder:
                (found,) = pool.run(1, functools.partial(traced, way, folder), timeout=seconds)
                path = machine.out / f"trace-{name}.json.gz"
                with open(Path(folder, "trace.json"), "rb") as plain, gzip.open(path, "wb") as packed:
                    shutil.copyfileobj(plain, packed)
            if not found["events"]:
                raise Missed(f"the trace of {name} is empty", figures)
            figures[path.name] = str(found)
    finally:
        pool.close()
    return figures
