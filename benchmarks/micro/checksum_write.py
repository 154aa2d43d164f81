"""Time a checksum and a write of the same bytes in blocks of several sizes: the CPU cost of a checkpoint's file.

    python benchmarks/micro/checksum_write.py --folder /on/the/disk

The sizes are interleaved over the repeats. As in fairshard/checkpoint/writer.py, write-back is started every
16 MiB, and the file is synced at the end.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from report import Spread, table

SIZES = {"whole": 0, "4 MiB": 1 << 22, "1 MiB": 1 << 20, "256 KiB": 1 << 18, "64 KiB": 1 << 16}
WRITE_BACK_NBYTES = 1 << 24


def write(views: Sequence[memoryview], path: str, block_nbytes: int) -> tuple[float, float]:
    """CPU seconds and wall seconds of one file."""
    os.sync()
    cpu, start = time.thread_time(), time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        crc = written = started = 0
        for view in views:
            for first in range(0, len(view), block_nbytes or len(view)):
                block = view[first : first + (block_nbytes or len(view))]
                crc = zlib.crc32(block, crc)
                written += file.write(block)
                if written - started >= WRITE_BACK_NBYTES:
                    os.posix_fadvise(file.fileno(), started, written - started, os.POSIX_FADV_DONTNEED)
                    started = written
        os.fsync(file.fileno())
    seconds = time.thread_time() - cpu, time.perf_counter() - start
    os.unlink(path)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="on the disk to measure (default: the system's temporary folder)")
    parser.add_argument("--tensor-mb", type=int, default=40)
    parser.add_argument("--tensors", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    tensors = [torch.randn(options.tensor_mb * 10**6 // 4) for _ in range(options.tensors)]
    views = [memoryview(tensor.numpy()).cast("B") for tensor in tensors]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in SIZES}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for _ in range(options.repeat):
            for name, block_nbytes in SIZES.items():
                times[name].append(write(views, f"{folder}/file", block_nbytes))
    rows = [["block", "CPU s", "s"]]
    for name, own in times.items():
        rows.append([name, *(Spread.of(column).show(2) for column in zip(*own, strict=True))])
    print(table(rows))


if __name__ == "__main__":
    main()
