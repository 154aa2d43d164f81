"""Measure gloo's ways to move a whole buffer, to choose between them in ``fairshard/utils/collectives.py``.

    python benchmarks/collectives.py                    # worlds 2, 3, 4; 64 KiB to 64 MiB
    python benchmarks/collectives.py --worlds 2 --sizes 1048576

A size is that of the whole fp32 buffer ``[world_size, numel / world_size]``: what a gather writes and what a
reduce-scatter reads. Every way is first checked against the expected result.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import record
import report
import torch
import torch.distributed as dist
from rank import Rank
from runner import Job, run
from torch import Tensor

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
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        numel = nbytes // 4 // self.world
        self.whole, self.received = torch.zeros(self.world, numel), torch.zeros(self.world, numel)
        self.row = torch.zeros(numel)

    def exchange(self, sent: Callable[[int], Tensor]) -> None:
        """Send each other rank a row, and receive theirs."""
        peers = [peer for peer in range(self.world) if peer != self.rank]
        works = [dist.isend(sent(peer), peer) for peer in peers]
        works += [dist.irecv(self.received[peer], peer) for peer in peers]
        for work in works:
            work.wait()

    def add(self, rows: list[Tensor]) -> None:
        """Add ``rows`` in rank order."""
        torch.add(rows[0], rows[1], out=self.row)
        for row in rows[2:]:
            self.row.add_(row)


def gather_exchange(buffers: Buffers) -> None:
    """Copy this rank's row in place, send it to every rank, and receive the other rows directly."""
    own = buffers.received[buffers.rank]
    own.copy_(buffers.row)
    buffers.exchange(lambda peer: own)


def reduce_all_to_all(buffers: Buffers) -> None:
    """Exchange rows with the built-in all-to-all, then add them in rank order."""
    dist.all_to_all_single(buffers.received.view(-1), buffers.whole.view(-1))
    buffers.add(list(buffers.received))


def reduce_exchange(buffers: Buffers) -> None:
    """Send each row to its owner, receive all parts of this rank's row, and add them in rank order."""
    buffers.exchange(lambda peer: buffers.whole[peer])
    rows = list(buffers.received)
    rows[buffers.rank] = buffers.whole[buffers.rank]
    buffers.add(rows)


WAYS: dict[str, Callable[[Buffers], None]] = {
    "all_gather_single": lambda buffers: ALL_GATHER(buffers.received.view(-1), buffers.row),
    "gather: direct exchange": gather_exchange,
    "reduce_scatter_single": lambda buffers: REDUCE_SCATTER(buffers.row, buffers.whole.view(-1)),
    "all_to_all + sum": reduce_all_to_all,
    "reduce: direct exchange + sum": reduce_exchange,
}


def measure(rank: Rank, nbytes: int) -> dict[str, list[float]]:
    """Seconds of each call of every way; interleaved, so that other load on the machine affects all alike."""
    buffers = Buffers(nbytes)
    for way in WAYS:
        _check(way, buffers)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(max(MIN_CALLS, min(MAX_CALLS, BYTES_PER_ROUND // nbytes))):
        for way, call in WAYS.items():
            dist.barrier()
            start = time.perf_counter()
            call(buffers)
            seconds[way].append(time.perf_counter() - start)
    return seconds


def _check(way: str, buffers: Buffers) -> None:
    """Raise if ``way`` is wrong where each rank contributes its number plus one."""
    buffers.whole.fill_(buffers.rank + 1)
    buffers.row.fill_(buffers.rank + 1)
    WAYS[way](buffers)
    sums = torch.full_like(buffers.row, buffers.world * (buffers.world + 1) / 2)
    rows = torch.arange(1.0, buffers.world + 1)[:, None].expand_as(buffers.received)
    if not torch.equal(*((buffers.received, rows) if "gather" in way else (buffers.row, sums))):
        raise RuntimeError(f"{way} gives a wrong result at world size {buffers.world}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes")
    options = parser.parse_args()
    options.out = record.result_file("collectives")
    runs = []
    for world in options.worlds:
        rows = [["KiB", *WAYS]]
        for size in options.sizes:
            (ranks,) = run(Job("collectives:measure", {"nbytes": size}, world))
            calls = {way: zip(*(one[way] for one in ranks), strict=True) for way in WAYS}
            slowest = {way: [1e3 * max(call) for call in own] for way, own in calls.items()}
            runs += [{"world": world, "nbytes": size, "way": way, "milliseconds": own} for way, own in slowest.items()]
            rows.append([str(size // KIB), *(f"{statistics.median(own):.3f}" for own in slowest.values())])
        print(f"\nworld size {world}, median ms of the slowest rank\n{report.table(rows)}")
    record.write(options.out, record.header(__file__, options), runs=runs)
    print(f"\nwritten: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
