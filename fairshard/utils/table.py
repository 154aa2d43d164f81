"""Rows of text with aligned columns."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Lines of ``rows`` with a rule below the first and above the last; ``sides`` is ``<`` or ``>`` by column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    rule = "-" * max(map(len, lines))
    return [lines[0], rule, *lines[1:-1], rule, lines[-1]]
