"""Measure gloo's ways to move a whole buffer, to choose between them in ``fairshard/utils/collectives.py``.

    python benchmarks/micro/collectives.py                    # worlds 2, 3, 4; 64 KiB to 64 MiB
    python benchmarks/micro/collectives.py --worlds 2 --sizes 1048576

A size is that of the whole fp32 buffer ``[world_size, numel / world_size]``: what a gather writes and what a
reduce-scatter reads. Every way is first checked against the expected result.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import worlds

KIB, MIB = 2**10, 2**20
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
BYTES_PER_ROUND = 128 * MIB
"""Small sizes are repeated until a way has moved this much, within `MIN_CALLS` and `MAX_CALLS`."""
MIN_CALLS, MAX_CALLS = 5, 50


# Renamed in torch 2.13, where the old names warn.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Buffers:
    """One rank's tensors for one size, allocated once so that page faults are not measured."""

    def __init__(self, nbytes: int):
        self.rank = dist.get_rank()
        self.peers = [peer for peer in range(dist.get_world_size()) if peer != self.rank]
        numel = nbytes // 4 // dist.get_world_size()
        self.whole = torch.zeros(dist.get_world_size(), numel)
        self.received = torch.zeros(dist.get_world_size(), numel)
        self.row = torch.zeros(numel)

    def fill(self) -> None:
        """Fill the buffer with what this rank contributes: its number plus one."""
        self.whole.fill_(self.rank + 1)
        self.received.zero_()
        self.row.fill_(self.rank + 1)


def gather_builtin(buffers: Buffers) -> None:
    """Gather ``row`` into ``received`` with gloo's all-gather."""
    ALL_GATHER(buffers.received.view(-1), buffers.row)


def gather_exchange(buffers: Buffers) -> None:
    """Copy this rank's row in place, send it to every rank, and receive the other rows directly."""
    own = buffers.received[buffers.rank]
    own.copy_(buffers.row)
    works = [dist.isend(own, peer) for peer in buffers.peers]
    works += [dist.irecv(buffers.received[peer], peer) for peer in buffers.peers]
    for work in works:
        work.wait()


def reduce_builtin(buffers: Buffers) -> None:
    """Reduce-scatter ``whole`` into ``row`` with gloo's reduce-scatter."""
    REDUCE_SCATTER(buffers.row, buffers.whole.view(-1))


def reduce_all_reduce(buffers: Buffers) -> None:
    """All-reduce the whole buffer and keep one row of it."""
    dist.all_reduce(buffers.whole)
    buffers.row.copy_(buffers.whole[buffers.rank])


def reduce_all_to_all(buffers: Buffers) -> None:
    """Exchange rows with the built-in all-to-all, then add them in rank order."""
    dist.all_to_all_single(buffers.received.view(-1), buffers.whole.view(-1))
    _add_in_order(list(buffers.received), buffers.row)


def reduce_exchange(buffers: Buffers) -> None:
    """Send each row to its owner, receive all parts of this rank's row, and add them in rank order."""
    works = [dist.isend(buffers.whole[peer], peer) for peer in buffers.peers]
    works += [dist.irecv(buffers.received[peer], peer) for peer in buffers.peers]
    for work in works:
        work.wait()
    rows = list(buffers.received)
    rows[buffers.rank] = buffers.whole[buffers.rank]
    _add_in_order(rows, buffers.row)


def _add_in_order(rows: list[Tensor], out: Tensor) -> None:
    torch.add(rows[0], rows[1], out=out)
    for row in rows[2:]:
        out.add_(row)


Way = Callable[[Buffers], None]
GATHERS: dict[str, Way] = {
    "all_gather_single": gather_builtin,
    "gather: direct exchange": gather_exchange,
}
REDUCES: dict[str, Way] = {
    "reduce_scatter_single": reduce_builtin,
    "all_reduce": reduce_all_reduce,
    "all_to_all + sum": reduce_all_to_all,
    "reduce: direct exchange + sum": reduce_exchange,
}
WAYS = {**GATHERS, **REDUCES}


def measure_rank(rank: int, world_size: int, sizes: tuple[int, ...], folder: str) -> None:
    """Time every way on one rank and write the seconds of each call, as ``{size: {way: [seconds]}}``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    seconds: dict[int, dict[str, list[float]]] = {}
    for size in sizes:
        buffers = Buffers(size)
        for way, call in WAYS.items():
            _check(way, call, buffers)
        seconds[size] = {way: [] for way in WAYS}
        for _ in range(max(MIN_CALLS, min(MAX_CALLS, BYTES_PER_ROUND // size))):
            for way, call in WAYS.items():  # interleaved: other load on the machine affects all ways alike
                seconds[size][way].append(_time(call, buffers))
    Path(folder, f"rank{rank}.json").write_text(json.dumps(seconds))
    dist.barrier()
    os._exit(0)  # gloo groups sometimes hang while Python drops its last references


def _check(way: str, call: Way, buffers: Buffers) -> None:
    buffers.fill()
    call(buffers)
    world_size = len(buffers.peers) + 1
    if way in GATHERS:
        correct = all(bool((row == source + 1).all()) for source, row in enumerate(buffers.received))
    else:
        correct = bool((buffers.row == world_size * (world_size + 1) / 2).all())
    if not correct:
        raise RuntimeError(f"{way} gives a wrong result at world size {world_size}")


def _time(call: Way, buffers: Buffers) -> float:
    dist.barrier()
    start = time.perf_counter()
    call(buffers)
    return time.perf_counter() - start


def show(world_size: int, milliseconds: worlds.Milliseconds) -> None:
    """Print the medians of one world, sizes down and ways across."""
    print(f"\nworld size {world_size}, median ms of the slowest rank")
    print("  ".join(["     KiB", *WAYS]))
    for size, ways in milliseconds.items():
        cells = [f"{statistics.median(ways[way]):.3f}".rjust(len(way)) for way in WAYS]
        print("  ".join([f"{int(size) // KIB:8d}", *cells]))


if __name__ == "__main__":
    worlds.run(__file__, __doc__, measure_rank, SIZES, show)
