"""Measured host time of the engine by the number of ranks, from ``benchmarks/results``."""

from __future__ import annotations

import statistics
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import record

from scaling.step_time import HostTime

sys.path.insert(0, str(record.ROOT / "benchmarks" / "micro"))

import host_by_world

WORLDS = (8, 1024, 16384)
WRAPPER, FULLY_SHARD = "fairshard", "fairshard-fully-shard"


def measure(repeat: int) -> list[dict[str, Any]]:
    """Runs of ``benchmarks/micro/host_by_world.py``: ``engine``, ``world_size``, ``repeat``, ``seconds`` per unit.

    Small units: what is measured is bookkeeping, because an accelerator clears and copies memory itself.
    """
    runs = []
    for number in range(repeat):
        plain = host_by_world.measure(host_by_world.PLAIN, 1, host_by_world.SMALL)
        for engine in (WRAPPER, FULLY_SHARD):
            for world_size in WORLDS:
                own = host_by_world.measure(engine, world_size, host_by_world.SMALL)
                runs.append({"engine": engine, "world_size": world_size, "repeat": number, "seconds": own - plain})
    return runs


def latest() -> Path:
    """The newest file of measurements."""
    return max(record.RESULTS.glob("*-scale-host.json"))


def by_engine(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Median seconds per unit: ``[engine][world_size]``."""
    found: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        found.setdefault(run["engine"], {}).setdefault(run["world_size"], []).append(run["seconds"])
    return {engine: {w: statistics.median(s) for w, s in sorted(own.items())} for engine, own in found.items()}


def at(measured: Mapping[int, float], num_shards: int) -> HostTime:
    """Host time for ``num_shards`` ranks, on straight lines between the measured numbers of ranks."""
    worlds = sorted(measured)
    upper = min(max(bisect_left(worlds, num_shards), 1), len(worlds) - 1)
    low, high = worlds[upper - 1], worlds[upper]
    share = max((num_shards - low) / (high - low), 0.0)
    return HostTime(measured[low] + share * (measured[high] - measured[low]))
