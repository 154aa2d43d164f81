"""Measure when a parameter should be received where it computes rather than copied out of a gathered buffer.

    python benchmarks/micro/in_place.py                       # 2, 3 and 4 ranks, parameters of 16 KiB to 4 MiB
    python benchmarks/micro/in_place.py --worlds 2 --sizes 262144

A unit of `fully_shard` holds four fp32 parameters of one size. The time is that of ``unshard()`` and ``reshard()``, of
the slowest rank; the two ways take turns. Sets the threshold in ``fairshard/views/received_in_place.py``.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import worlds
from measure import loaded_module

from fairshard.nn import fully_shard

KIB = 1 << 10
SIZES = tuple(size * KIB for size in (16, 64, 256, 1024, 4096))
WAYS = {"copied out": 1 << 60, "in place": 1}
"""The least bytes that a rank sends of a parameter that is received in place, by way."""
NUM_PARAMS, WARMUP, CALLS = 4, 5, 60


class Unit(nn.Module):
    """Parameters of ``nbytes`` each, in rows of 1 KiB."""

    def __init__(self, nbytes: int):
        super().__init__()
        self.weights = nn.ParameterList(torch.full((nbytes // KIB, 256), float(i)) for i in range(NUM_PARAMS))


def sharded(nbytes: int, way: str) -> Any:
    """A unit that gathers in ``way``."""
    settings: Any = loaded_module("received_in_place", "_MIN_NBYTES")
    settings._MIN_NBYTES = WAYS[way]
    unit: Any = fully_shard(Unit(nbytes))
    _gather(unit)
    return unit


def _gather(unit: Any) -> float:
    dist.barrier()
    start = time.perf_counter()
    unit.unshard()
    unit.reshard()
    return time.perf_counter() - start


def measure_rank(rank: int, world_size: int, sizes: tuple[int, ...], folder: str) -> None:
    """Time both ways on one rank and write the seconds of each call, as ``{size: {way: [seconds]}}``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    seconds: dict[int, dict[str, list[float]]] = {}
    for size in sizes:
        units = {way: sharded(size, way) for way in WAYS}
        for unit in units.values():
            unit.unshard()
            for i, weight in enumerate(unit.weights):
                if not bool((weight == i).all()):
                    raise RuntimeError(f"parameter {i} is wrong at world size {world_size}")
            unit.reshard()
        calls = [{way: _gather(unit) for way, unit in units.items()} for _ in range(WARMUP + CALLS)]
        seconds[size] = {way: [call[way] for call in calls[WARMUP:]] for way in WAYS}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(seconds))
    dist.barrier()
    os._exit(0)  # gloo groups sometimes hang while Python drops its last references


def show(world_size: int, milliseconds: worlds.Milliseconds) -> None:
    """Print the medians of one world, and that of the ratios of calls that took turns."""
    print(f"\nworld size {world_size}, median ms of the slowest rank, {NUM_PARAMS} parameters of so many KiB")
    print("     KiB  copied out  in place  ratio")
    for size, ways in milliseconds.items():
        copied, placed = ways["copied out"], ways["in place"]
        ratio = statistics.median(new / old for new, old in zip(placed, copied, strict=True))
        shown = f"{statistics.median(copied):10.3f}  {statistics.median(placed):8.3f}  {ratio:5.2f}"
        print(f"{int(size) // KIB:8d}  {shown}")


if __name__ == "__main__":
    worlds.run(__file__, __doc__, measure_rank, SIZES, show)
