"""Runs a measurement of several ways on several numbers of gloo ranks; for the scripts beside this file."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[1]))
import record

Milliseconds = dict[str, dict[str, list[float]]]
"""Of the slowest rank, call by call: ``{size: {way: [...]}}``."""


def run(
    script: str,
    description: str | None,
    measure_rank: Callable[[int, int, tuple[int, ...], str], None],
    sizes: Sequence[int],
    show: Callable[[int, Milliseconds], None],
) -> None:
    """Measure on the command line's worlds and sizes, by default ``sizes`` in bytes; show and write the results.

    ``measure_rank(rank, world_size, sizes, folder)`` writes ``{size: {way: [seconds]}}`` to ``rank<n>.json``.
    """
    name = Path(script).stem.replace("_", "-")
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(sizes), help="bytes")
    parser.add_argument("--out", type=Path, default=record.RESULTS / f"{datetime.date.today()}-{name}.json")
    options = parser.parse_args()

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    runs: list[dict[str, Any]] = []
    for world_size in options.worlds:
        milliseconds = _measure(world_size, tuple(options.sizes), measure_rank)
        show(world_size, milliseconds)
        for size, ways in milliseconds.items():
            run = {"world": world_size, "nbytes": int(size)}
            runs += [{**run, "way": way, "milliseconds": own} for way, own in ways.items()]
    record.write(options.out, record.header(script, options), runs=runs)
    print(f"\nwritten: {options.out}")


def _measure(world_size: int, sizes: tuple[int, ...], measure_rank: Callable[..., None]) -> Milliseconds:
    with tempfile.TemporaryDirectory(prefix="fairshard-micro-") as folder:
        mp.spawn(measure_rank, (world_size, sizes, folder), nprocs=world_size)
        ranks = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(world_size)]
    return {
        size: {way: _slowest_ms([rank[size][way] for rank in ranks]) for way in ways} for size, ways in ranks[0].items()
    }


def _slowest_ms(seconds_by_rank: list[list[float]]) -> list[float]:
    return [1e3 * max(call) for call in zip(*seconds_by_rank, strict=True)]
