"""Files that an attacker would write: pickles that overflow, stall or fill memory, and archives that claim anything."""

import io
import pickle
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import torch

_P = (1 << 61) - 1  # all its multiples have the hash 0


def _repeated(part, before=b"\x80\x04", after=b"."):
    return lambda nbytes: before + part * ((nbytes - len(before) - len(after)) // len(part)) + after


def _batches(part, after=b"."):
    batch = b"(" + part * 1000 + b"e"
    return _repeated(batch, b"\x80\x04]", after)


def _equal_hashes(nbytes):
    parts, size, number = [], 0, 1
    while size < nbytes - 100:
        value = (number * _P).to_bytes(((number * _P).bit_length() + 8) // 8, "little")
        parts.append(b"\x8a" + bytes([len(value)]) + value + b"N")
        size, number = size + len(parts[-1]), number + 1
    batches = (b"".join(parts[start : start + 1000]) for start in range(0, len(parts), 1000))
    return b"\x80\x04}" + b"".join(b"(" + batch + b"u" for batch in batches) + b"."


def _doubled(nbytes):
    """Tuples of the previous one twice: the last, a key, has 2**200 parts."""
    doubled = (b"h" + bytes([index]) + b"h" + bytes([index]) + b"\x86\x94" for index in range(200))
    return b"\x80\x04N\x94" + b"".join(doubled) + b"}h\xc8Ns."


def _nested_keys(nbytes):
    return b"\x80\x04}N" + b"\x85" * (nbytes - 7) + b"Ns."


PICKLES = {
    "a deep tuple as a key": _nested_keys,
    "a deep tuple": lambda nbytes: b"\x80\x04N" + b"\x85" * (nbytes - 4) + b".",
    "a deep list": lambda nbytes: b"\x80\x04" + b"]" * (nbytes // 2) + b"a" * (nbytes // 2 - 4) + b".",
    "doubled tuples as a key": _doubled,
    "an index of the memo": lambda nbytes: b"\x80\x02Nr\xff\xff\xff\x1f.",
    "keys of one hash": _equal_hashes,
    "the memo": _repeated(b"\x94", b"\x80\x04N"),
    "lists on the stack": _repeated(b"]"),
    "values on the stack": _repeated(b"N"),
    "marks": _repeated(b"("),
    "marked tuples": _repeated(b"(t"),
    "sets": _repeated(b"\x8f"),
    "dicts in batches": _batches(b"}"),
    "lists in batches": _batches(b"]\x94"),
    "tuples in batches": _batches(b"N\x85"),
    "strings in batches": _batches(b"\x8c\x02ab"),
    "values in batches": _batches(b"N"),
    "strings and lists": _batches(b"\x8c\x02ab]"),
    "appended": _repeated(b"Na", b"\x80\x04]"),
    "empty batches": _repeated(b"(e", b"\x80\x04]"),
    "keys": _batches(b"\x86", b"."),
    "numbers as keys": lambda nbytes: (
        b"\x80\x04}" + b"".join(b"J" + struct.pack("<i", i) + b"Ns" for i in range(nbytes // 7)) + b"."
    ),
    "memo again and again": _repeated(b"q\x00", b"\x80\x02N"),
    "a long number": lambda nbytes: b"\x80\x04\x8b" + struct.pack("<i", nbytes) + b"\x7f" * nbytes + b".",
    "a string longer than the file": lambda nbytes: b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"a.",
    "a bytearray of a length": lambda nbytes: b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R.",
    "a tensor of a length": lambda nbytes: b"\x80\x02ctorch\nFloatTensor\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R.",
    "a list in itself": lambda nbytes: b"\x80\x04]\x94h\x00a.",
    "nothing": lambda nbytes: b"",
}


@dataclass
class Archive:
    """A zip archive as ``torch.save`` writes it, of any claims; ``stated`` are the sizes that it says of records."""

    records: dict[str, bytes]
    stated: dict[str, int] = field(default_factory=dict)
    deflated: frozenset[str] = frozenset()

    def to_bytes(self):
        """The bytes of the file."""
        file, directory = io.BytesIO(), b""
        for name, data in self.records.items():
            place, size = file.tell(), self.stated.get(name, len(data))
            method, path = (8, f"a/{name}".encode()) if name in self.deflated else (0, f"a/{name}".encode())
            if method:
                deflate = zlib.compressobj(9, wbits=-15)
                data = deflate.compress(data) + deflate.flush()
            stored = len(data) if method else size
            sizes = struct.pack("<III", zlib.crc32(data), 0xFFFFFFFF, 0xFFFFFFFF)
            extra = struct.pack("<HHQQ", 1, 16, size, stored)
            pad = -(place + 30 + len(path) + len(extra) + 4) % 64
            padding = struct.pack("<HH", 0x4246, pad) + bytes(pad)
            head = struct.pack("<4sHHHHH", b"PK\x03\x04", 45, 0, method, 0, 0) + sizes
            file.write(head + struct.pack("<HH", len(path), len(extra) + len(padding)) + path + extra + padding + data)
            entry = struct.pack("<4sHHHHHH", b"PK\x01\x02", 45, 45, 0, method, 0, 0) + sizes
            extra = struct.pack("<HHQQQ", 1, 24, size, stored, place)
            entry += struct.pack("<HHHHHII", len(path), len(extra), 0, 0, 0, 0, 0xFFFFFFFF) + path + extra
            directory += entry
        self._end(file, directory, len(self.records))
        return file.getvalue()

    def write_sparse(self, path, name, nbytes):
        """Write the file with ``nbytes`` zeros as the last record ``name``, which take no room on a disk."""
        data = Archive({**self.records, name: b""}, {name: nbytes}).to_bytes()
        start = data.index(f"a/{name}".encode()) + len(f"a/{name}") + 20
        start += 4 + struct.unpack_from("<H", data, start + 2)[0]
        head, directory = data[:start], data[start : data.index(b"PK\x06\x06")]
        with Path(path).open("wb") as file:
            file.write(head)
            file.truncate(start + nbytes)
            file.seek(0, 2)
            self._end(file, directory, len(self.records) + 1)

    def _end(self, file, directory, count):
        start = file.tell()
        file.write(directory)
        place = file.tell()
        file.write(struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(directory), start))
        file.write(struct.pack("<4sIQI", b"PK\x06\x07", 0, place, 1))
        file.write(struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0))


def pickled_tensor(numel, shape, strides, after=b"."):
    """The pickle of a tensor that views storage 0, of any claims."""

    def opcodes(value):
        return pickle.dumps(value, 2)[2:-1]

    storage = b"(" + opcodes("storage") + b"ctorch\nFloatStorage\n" + opcodes("0") + opcodes("cpu") + opcodes(numel)
    view = opcodes(0) + opcodes(shape) + opcodes(strides)
    head = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("
    return head + storage + b"tQ" + view + b"\x89ccollections\nOrderedDict\n)RtR" + after


def archive_of(pickled, **records):
    """The bytes of an archive with this ``data.pkl``."""
    return Archive({"data.pkl": pickled, "byteorder": b"little", **records}).to_bytes()


def old_file_of(pickled):
    """The bytes of a file of torch before 1.6 with this object."""
    parts = (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, {"little_endian": True})
    return b"".join(pickle.dumps(part, 2) for part in parts) + pickled + pickle.dumps([], 2)
