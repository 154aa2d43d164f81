"""CRC-32 of bytes whose parts are summed apart: in several threads, or in any order."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31  # bits are reflected: the highest bit is x^0


def join_crcs(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of parts laid end to end, from ``(crc32, nbytes)`` of each.

    >>> import zlib
    >>> join_crcs([(zlib.crc32(b"fair"), 4), (zlib.crc32(b"shard"), 5)]) == zlib.crc32(b"fairshard")
    True

    Source: zlib's ``crc32_combine``, which Python's zlib module does not have.
    """
    joined = 0
    for crc, nbytes in parts:
        joined = _times(_power_of_x(8 * nbytes), joined) ^ crc
    return joined


def _times(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo the polynomial of CRC-32."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@cache
def _power_of_x(exponent: int) -> int:
    """x to the power of ``exponent``."""
    power, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            power = _times(square, power)
        square = _times(square, square)
        exponent >>= 1
    return power
