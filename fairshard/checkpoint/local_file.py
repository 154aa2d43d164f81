"""One file of a checkpoint on a local disk, read once: its entries into place, and its checksum on the way.

Bytes go from the file straight into the memory of the tensors that want them. A block is summed right after it is
read, while it is in the core's cache. Threads read entries side by side; the sums of their bytes are joined. What
cannot be read into place, such as a part of an entry or memory of a device, is copied by the calling thread: its stream
and its inference mode are those with which the targets were made.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fairshard.checkpoint.crc import join_crcs
from fairshard.checkpoint.plain_objects import read_object
from fairshard.checkpoint.storage import open_regular
from fairshard.checkpoint.stored_tensor import HEAD_NBYTES, StoredTensor, find_tensor

_BLOCK_NBYTES = 1 << 19
_PART_NBYTES = 1 << 25
_MAX_THREADS = 8


@dataclass
class Cut:
    """The part of a saved tensor that starts at ``starts``, has the shape ``sizes``, and goes into ``target``."""

    target: Tensor
    starts: Sequence[int]
    sizes: Sequence[int]


@dataclass
class Entry:
    """One entry of a file: its bytes ``[start, start + nbytes)``, and where they go.

    A tensor goes to ``cuts``; with ``keeps_bytes`` the bytes of an object stay in ``found``.
    """

    name: str
    start: int
    nbytes: int
    cuts: list[Cut] = field(default_factory=list)
    keeps_bytes: bool = False
    found: bytes = b""


class EntryError(Exception):
    """The entry ``name`` could not be read; the cause says why."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def read_entries(path: str, nbytes: int, entries: Sequence[Entry], sums: bool) -> int | None:
    """Read ``entries`` of a file of ``nbytes`` bytes; returns the CRC-32 of the whole file if ``sums``.

    Without ``sums`` only the entries are read.

    Raises:
        EntryError: an entry is not what ``torch.save`` wrote, or has another shape.
        OSError: the file cannot be read, or ends early.
    """
    ordered = sorted(entries, key=lambda entry: entry.start)
    parts: list[Entry] = list(_all_parts(ordered, nbytes)) if sums else ordered
    with open_regular(path) as file:
        descriptor = file.fileno()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        num_threads = _num_threads()
        crcs = []
        with ThreadPoolExecutor(num_threads, "fairshard read") as pool:
            for part, crc, tensor in _read_parts(pool, descriptor, parts, sums, num_ahead=2 * num_threads):
                crcs.append((crc, part.nbytes))
                if tensor is not None:
                    _spread(tensor, part)
    return join_crcs(crcs) if sums else None


def can_read(entries: Sequence[Entry], nbytes: int) -> bool:
    """Whether ``entries`` lie inside a file of ``nbytes`` bytes, without overlap; otherwise metadata are damaged."""
    end = 0
    for entry in sorted(entries, key=lambda entry: entry.start):
        if entry.start < end or entry.nbytes < 0:
            return False
        end = entry.start + entry.nbytes
    return end <= nbytes


def _all_parts(entries: Sequence[Entry], nbytes: int) -> Iterator[Entry]:
    """``entries``, in order, and what lies between them."""
    place = 0
    for entry in (*entries, Entry("", nbytes, 0)):
        for start in range(place, entry.start, _PART_NBYTES):
            yield Entry("", start, min(_PART_NBYTES, entry.start - start))
        yield entry
        place = entry.start + entry.nbytes


def _num_threads() -> int:
    """Threads of this rank: its share of the host's cores, at least 2, so that one reads while one sums."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 2), _MAX_THREADS)


class _Run:
    """Bytes of a file from ``place`` on, read in order and summed."""

    def __init__(self, descriptor: int, place: int, sums: bool) -> None:
        self._descriptor = descriptor
        self._place = place
        self._sums = sums
        self.crc = 0

    def into(self, memory: memoryview) -> None:
        """Fill ``memory``.

        Raises:
            OSError: the file ends before.
        """
        for start in range(0, len(memory), _BLOCK_NBYTES):
            block = memory[start : start + _BLOCK_NBYTES]
            done = 0
            while done < len(block):
                count = os.preadv(self._descriptor, [block[done:]], self._place)
                if not count:
                    raise OSError("the file ends too early")
                done += count
                self._place += count
            if self._sums:
                self.crc = zlib.crc32(block, self.crc)

    def take(self, nbytes: int) -> bytes:
        """The next ``nbytes`` bytes."""
        taken = bytearray(nbytes)
        self.into(memoryview(taken))
        return bytes(taken)


def _read_parts(
    pool: ThreadPoolExecutor, descriptor: int, parts: Sequence[Entry], sums: bool, num_ahead: int
) -> Iterator[tuple[Entry, int, Tensor | None]]:
    """Each part with its CRC-32 and, if it could not be read into place, its tensor; at most ``num_ahead`` wait."""
    running: deque[tuple[Entry, Future[tuple[int, Tensor | None]]]] = deque()
    for part in parts:
        running.append((part, pool.submit(_read_part, descriptor, part, sums)))
        if len(running) > num_ahead:
            done, result = running.popleft()
            yield done, *result.result()
    for done, result in running:
        yield done, *result.result()


def _read_part(descriptor: int, part: Entry, sums: bool) -> tuple[int, Tensor | None]:
    """Read one entry, or bytes that nobody wants; returns their CRC-32, and the tensor if it is still to be copied."""
    run = _Run(descriptor, part.start, sums)
    tensor = None
    if part.keeps_bytes:
        part.found = run.take(part.nbytes)
    elif part.cuts:
        try:
            tensor = _read_tensor(run, part)
        except OSError:
            raise
        except Exception as error:  # damaged bytes can raise anything
            raise EntryError(part.name) from error
    else:
        block = memoryview(bytearray(min(part.nbytes, _BLOCK_NBYTES)))
        for start in range(0, part.nbytes, _BLOCK_NBYTES):
            run.into(block[: part.nbytes - start])
    return run.crc, tensor


def _read_tensor(run: _Run, entry: Entry) -> Tensor | None:
    """Read a tensor into place, or, if that cannot be, return it."""
    head = run.take(min(HEAD_NBYTES, entry.nbytes))
    stored = find_tensor(head)
    if stored is None or stored.start + stored.nbytes > entry.nbytes:
        data = head + run.take(entry.nbytes - len(head))
        loaded = read_object(data)
        if not isinstance(loaded, Tensor):
            raise ValueError(f"it is {type(loaded).__name__}, not a tensor")
        return loaded
    tensor = _memory_for(entry.cuts, stored)
    memory = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    rest = _fill(run, head, stored, memory, entry.nbytes)
    if not stored.is_followed_by(rest):
        raise ValueError("its archive is damaged")
    return None if tensor is entry.cuts[0].target else tensor


def _memory_for(cuts: Sequence[Cut], stored: StoredTensor) -> Tensor:
    """The target itself, if it is all of the tensor that is ``stored``, in the same form; otherwise new memory."""
    target = cuts[0].target
    is_whole = len(cuts) == 1 and not any(cuts[0].starts) and tuple(target.shape) == stored.shape
    if is_whole and target.dtype == stored.dtype and target.is_cpu and target.is_contiguous():
        return target
    return torch.empty(stored.shape, dtype=stored.dtype, device="cpu")


def _fill(run: _Run, head: bytes, stored: StoredTensor, memory: memoryview, nbytes: int) -> bytes:
    """Fill ``memory`` with the elements, of which ``head`` has the first; returns what follows them."""
    first = head[stored.start : stored.start + len(memory)]
    memory[: len(first)] = first
    run.into(memory[len(first) :])
    after = head[stored.start + len(memory) :]
    return after + run.take(nbytes - max(len(head), stored.start + len(memory)))


def _spread(tensor: Tensor, entry: Entry) -> None:
    """Copy the parts of ``tensor`` that are wanted.

    Raises:
        EntryError: it has not the shape that was saved.
    """
    try:
        for cut in entry.cuts:
            cut.target.copy_(part_of(tensor, cut))
    except Exception as error:  # damaged bytes can be anything
        raise EntryError(entry.name) from error


def part_of(tensor: Tensor, cut: Cut) -> Tensor:
    """The part of a saved tensor that a cut wants.

    Raises:
        ValueError: the tensor has not the shape that was saved.
    """
    part = tensor
    for dim, (start, size) in enumerate(zip(cut.starts, cut.sizes, strict=True)):
        part = part.narrow(dim, start, size)
    if part.shape != cut.target.shape:
        raise ValueError(f"it has the shape {tuple(tensor.shape)}, which is not the one that was saved")
    return part
