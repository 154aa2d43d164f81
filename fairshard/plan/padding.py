"""Padding of units whose parameters are not cut inside blocks, and a table of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fairshard.utils.ragged_plan import RaggedPlan
from fairshard.utils.table import table

TOO_MUCH = 0.1
"""Padding, as a fraction of the parameters, above which a plan warns."""


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
