"""Sizes on the command line: 500MB, 80GB, 1.5 GiB."""

from __future__ import annotations

import argparse
import re

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_MAX_SIZE = 10**18
_LEAST_MEMORY = 10**6


def size_argument(text: str) -> int:
    """Type of an argument that is a size; the bytes.

    Raises:
        ArgumentTypeError: it is not one.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", text)
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or not 1 <= float(found[1]) * unit < _MAX_SIZE:
        raise argparse.ArgumentTypeError(f"a size must be a number with kB, MB, GB, KiB, MiB or GiB, but is {text!r}")
    return int(float(found[1]) * unit)


def memory_argument(text: str) -> int:
    """Type of an argument that is the memory of a device; the bytes. 80 alone is 80 bytes.

    Raises:
        ArgumentTypeError: it is no size, or below 1 MB.
    """
    nbytes = size_argument(text)
    if nbytes < _LEAST_MEMORY:
        raise argparse.ArgumentTypeError(f"a device must have 1 MB or more, but {text!r} is {nbytes} B; write 80GB")
    return nbytes
