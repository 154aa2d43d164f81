"""Mutations of files: bytes flipped, cut, repeated, moved and overwritten with values that parsers stumble over."""

import random
import struct

_ODD = [b"\0" * 8, b"\xff" * 8, b"\xff\xff\xff\x7f", b"(", b".", b"R", b"b", b"\x81", b"\x94", b"u"]
_ODD += [b"]", b"\x85", b"PK\x01\x02", b"PK\x05\x06", b'"', b"{", b"[", b"1e999", b"-1", b"../"]


def mutate(data, seed):
    """``data`` after one to four mutations; the same for the same seed."""
    chance = random.Random(seed)
    found = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        if found:
            _CHANGES[chance.randrange(len(_CHANGES))](found, chance)
    return bytes(found)


def _flip(data, chance):
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _set(data, chance):
    data[chance.randrange(len(data))] = chance.randrange(256)


def _overwrite(data, chance):
    odd, place = chance.choice(_ODD), chance.randrange(len(data))
    data[place : place + len(odd)] = odd


def _insert(data, chance):
    place = chance.randrange(len(data))
    data[place:place] = chance.choice(_ODD) * chance.choice([1, 1, 1, 50])


def _cut(data, chance):
    del data[chance.randrange(len(data)) :]


def _remove(data, chance):
    place = chance.randrange(len(data))
    del data[place : place + chance.randrange(1, 40)]


def _repeat(data, chance):
    place = chance.randrange(len(data))
    part = data[place : place + chance.randrange(1, 200)]
    data[place:place] = part * chance.choice([1, 2, 100])


def _swap(data, chance):
    one, other = chance.randrange(len(data)), chance.randrange(len(data))
    length = chance.randrange(1, 60)
    data[one : one + length] = data[other : other + length]


def _number(data, chance):
    value = chance.choice([0, 1, 255, 1 << 16, (1 << 31) - 1, (1 << 32) - 1, (1 << 63) - 1, chance.getrandbits(64)])
    place = chance.randrange(len(data))
    packed = struct.pack("<Q", value)[: chance.choice([1, 2, 4, 8])]
    data[place : place + len(packed)] = packed


_CHANGES = [_flip, _flip, _set, _overwrite, _insert, _cut, _remove, _repeat, _swap, _number]
