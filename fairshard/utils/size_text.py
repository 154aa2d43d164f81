"""Sizes in memory and on disk, as people read them."""


def size_text(nbytes: float) -> str:
    """Size in decimal units: 1.2 MB is 1,200,000 bytes."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= 0.9995 * size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"
