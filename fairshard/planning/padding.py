"""Padding of units whose parameters are not cut inside blocks, and how evenly ranks own whole ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fairshard.utils.ragged_plan import RaggedPlan
from fairshard.utils.table import table

TOO_MUCH = 0.1
"""Padding, as a fraction of the parameters, above which a plan warns; also an excess of one rank over the mean."""


@dataclass(frozen=True)
class PaddingRow:
    """The padding of one unit: ``padded`` elements of all ranks hold ``numel`` of parameters, on ``num_lines`` lines.

    ``least`` is what ``padded`` cannot be below, however the parameters are placed.
    """

    fqn: str
    numel: int
    padded: int
    least: int
    num_lines: int

    @staticmethod
    def of(fqn: str, plans: Sequence[RaggedPlan]) -> PaddingRow:
        """The row of unit ``fqn``, whose parameters are placed by ``plans``, one for each of their kinds."""
        return PaddingRow(
            fqn,
            sum(plan.numel for plan in plans),
            sum(plan.width * plan.world_size for plan in plans),
            sum(plan.bound * plan.world_size for plan in plans),
            sum(len(plan.lines) for plan in plans),
        )

    @property
    def padding(self) -> float:
        """Padding as a fraction of the parameters."""
        return (self.padded - self.numel) / self.numel if self.numel else 0.0

    @property
    def least_padding(self) -> float:
        """The least possible `padding`."""
        return (self.least - self.numel) / self.numel if self.numel else 0.0


@dataclass(frozen=True)
class OwnedBytes:
    """Bytes of parameters that one rank alone has: of the rank that owns ``least``, of all, and of that with ``most``.

    Memory is that of the last.
    """

    least: int
    total: int
    most: int
    world_size: int

    @staticmethod
    def of(loads: Sequence[int]) -> OwnedBytes | None:
        """Of ranks that own ``loads``; None if these are all 0."""
        return OwnedBytes(min(loads), sum(loads), max(loads), len(loads)) if any(loads) else None

    @property
    def excess(self) -> float:
        """The largest share above the mean, as a fraction of the mean."""
        return self.most * self.world_size / self.total - 1

    def lines(self) -> list[str]:
        """It as a line of text, with a warning if one rank has far more than the mean."""
        mean = self.total // self.world_size
        lines = [f"owned by one rank each: {self.least:,} to {self.most:,} bytes a rank, {mean:,} on average"]
        if self.excess > TOO_MUCH:
            lines.append(
                f"warning: one rank owns {self.excess:.0%} more than the mean, because single parameters are large for "
                "this many ranks. Place those by RowBlocks, or as by default."
            )
        return lines


def padding_lines(rows: Sequence[PaddingRow]) -> list[str]:
    """The padding of units as a table, with a warning if it is above a tenth of the whole model; empty without rows."""
    if not rows:
        return []
    numel, padded, least, num_lines = (
        sum(getattr(row, name) for row in rows) for name in ("numel", "padded", "least", "num_lines")
    )
    whole = PaddingRow("all", numel, padded, least, num_lines)
    cells: list[tuple[str, ...]] = [("unit", "placed by blocks", "lines", "padding", "at least")]
    for row in (*rows, whole):
        figures = f"{row.numel:,}", str(row.num_lines), f"{row.padding:.2%}", f"{row.least_padding:.2%}"
        cells.append((row.fqn or "(root)", *figures))
    lines = table(cells, "<>>>>")
    if whole.padding > TOO_MUCH:
        worst = max(rows, key=lambda row: row.padded - row.numel)
        lines.append(
            f"warning: padding is {whole.padding:.0%} of the parameters placed by blocks, most of it in unit "
            f"{worst.fqn or '(root)'}: its blocks are large for this many ranks. Use smaller blocks or larger units."
        )
    return lines
