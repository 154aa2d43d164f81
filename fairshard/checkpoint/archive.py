"""The records of a file that ``torch.save`` wrote: a zip archive that stores its records as they are.

Only what ``torch.save`` writes is accepted: no compression, so that a record is never larger than the file; no comment;
a directory that ends where its trailer begins. Two readers of such an archive cannot disagree about it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

_LOCAL, _ENTRY, _TRAILER = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_TRAILER64, _LOCATOR = b"PK\x06\x06", b"PK\x06\x07"
_LOCAL_HEAD = struct.Struct("<4s22xHH")  # lengths of the name and of what follows it
_ENTRY_HEAD = struct.Struct("<4s4xHH8xIIHHH8xI")  # flags, method, two sizes, three lengths, place of the local header
_TRAILER_TAIL = struct.Struct("<4s4x2HIIH")  # two counts, size and place of the directory, length of a comment
_TRAILER64_HEAD = struct.Struct("<4s20x4Q")  # the same in 64 bits
_LOCATOR_HEAD = struct.Struct("<4s4xQ4x")  # place of the 64-bit trailer
_ENCRYPTED = 1
_IN_64_BITS = 0xFFFFFFFF


class ArchiveError(ValueError):
    """The bytes are not an archive that ``torch.save`` wrote."""


class Record(NamedTuple):
    """The bytes ``[start, stop)`` of the file."""

    start: int
    stop: int


def is_archive(data: Any) -> bool:
    """Whether ``data`` begins like an archive; older files of ``torch.save`` do not."""
    return bytes(data[:4]) == _LOCAL


def find_records(data: Any) -> dict[str, Record]:
    """The records of an archive by name, without the folder that they are all in; ``data`` is bytes or a memoryview.

    Raises:
        ArchiveError: it is damaged, or not what ``torch.save`` wrote.
    """
    try:
        records: dict[str, Record] = {}
        for path, record in _entries(data):
            name = path.partition("/")[2]
            if name in records:
                raise ArchiveError(f"its archive has two records {name!r:.80}")
            records[name] = record
    except (struct.error, UnicodeDecodeError) as error:
        raise ArchiveError(f"its archive is damaged: {error}") from error
    return records


def _entries(data: Any) -> Iterator[tuple[str, Record]]:
    place, end = _directory(data)
    while place < end:
        signature, flags, method, *sizes = _ENTRY_HEAD.unpack_from(data, place)
        stored, nbytes, name_nbytes, extra_nbytes, note_nbytes, local = sizes
        extra_at = place + _ENTRY_HEAD.size + name_nbytes
        name = bytes(data[extra_at - name_nbytes : extra_at]).decode()
        place = extra_at + extra_nbytes + note_nbytes
        if signature != _ENTRY or place > end:
            raise ArchiveError("the directory of its archive is damaged")
        if method or flags & _ENCRYPTED:
            raise ArchiveError(f"its archive has the compressed record {name!r:.80}, which torch.save never writes")
        wide = _wide(data, extra_at, extra_nbytes)
        nbytes = next(wide) if nbytes == _IN_64_BITS else nbytes
        stored = next(wide) if stored == _IN_64_BITS else stored
        local = next(wide) if local == _IN_64_BITS else local
        signature, local_name_nbytes, local_extra_nbytes = _LOCAL_HEAD.unpack_from(data, local)
        start = local + _LOCAL_HEAD.size + local_name_nbytes + local_extra_nbytes
        if signature != _LOCAL or stored != nbytes or start + nbytes > len(data):
            raise ArchiveError(f"its archive ends before the record {name!r:.80} does")
        yield name, Record(start, start + nbytes)


def _directory(data: Any) -> tuple[int, int]:
    """Where the directory begins and ends."""
    trailer = len(data) - _TRAILER_TAIL.size
    if trailer < 0:
        raise ArchiveError("it is too short")
    signature, _, count, nbytes, start, comment = _TRAILER_TAIL.unpack_from(data, trailer)
    if signature != _TRAILER or comment:
        raise ArchiveError("the end of its archive is missing")
    end = trailer
    if count == 0xFFFF or nbytes == _IN_64_BITS or start == _IN_64_BITS:
        signature, end = _LOCATOR_HEAD.unpack_from(data, max(trailer - _LOCATOR_HEAD.size, 0))
        if signature != _LOCATOR or end > trailer:
            raise ArchiveError("the end of its archive is damaged")
        signature, _, count, nbytes, start = _TRAILER64_HEAD.unpack_from(data, end)
        if signature != _TRAILER64:
            raise ArchiveError("the end of its archive is damaged")
    if start + nbytes > end:
        raise ArchiveError("the directory of its archive is damaged")
    return start, start + nbytes


def _wide(data: Any, place: int, nbytes: int) -> Iterator[int]:
    """The 64-bit sizes and places in the extra field of an entry."""
    end = place + nbytes
    while place + 4 <= end:
        kind, length = struct.unpack_from("<HH", data, place)
        if kind == 1:
            for at in range(place + 4, min(place + 4 + length, end) - 7, 8):
                yield struct.unpack_from("<Q", data, at)[0]
        place += 4 + length
    raise ArchiveError("a size in its archive is missing")
