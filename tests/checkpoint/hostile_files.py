"""Files that an attacker would write: pickles that overflow, stall or fill memory, and archives of them."""

import io
import pickle
import struct
import zipfile

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


def pickled_tensor(numel, shape, strides, after=b"."):
    """The pickle of a tensor that views storage 0, of any claims."""

    def opcodes(value):
        return pickle.dumps(value, 2)[2:-1]

    storage = b"(" + opcodes("storage") + b"ctorch\nFloatStorage\n" + opcodes("0") + opcodes("cpu") + opcodes(numel)
    view = opcodes(0) + opcodes(shape) + opcodes(strides)
    head = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("
    return head + storage + b"tQ" + view + b"\x89ccollections\nOrderedDict\n)RtR" + after


def archive_of(pickled, method=zipfile.ZIP_STORED, **records):
    """The bytes of an archive with this ``data.pkl``."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in {"data.pkl": pickled, "byteorder": b"little", **records}.items():
            archive.writestr(f"a/{name}", data)
    return file.getvalue()
