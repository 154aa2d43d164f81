"""Sizes of the units of a wrapped model, and a table of them."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import nn

from fairshard.engine.tree import units_below
from fairshard.utils.layout import FlatLayout
from fairshard.utils.placed_layout import OwnedLayout
from fairshard.utils.size_text import size_text
from fairshard.utils.table import table

__all__ = [
    "FlatSizes",
    "UnitRow",
    "large_unit_warning",
    "unit_lines",
    "unit_row",
    "unit_table",
]


@dataclass(frozen=True)
class FlatSizes:
    """Sizes of one flat param; those of shards are of rank ``rank``, if ranks own unequal numbers of elements."""

    layout: FlatLayout
    param_dtype: torch.dtype
    compute_dtype: torch.dtype
    requires_grad: bool
    rank: int = 0

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard."""
        return self.layout.widths[self.rank] if isinstance(self.layout, OwnedLayout) else self.layout.shard_numel

    @property
    def shard_nbytes(self) -> int:
        """Bytes of one rank's shard."""
        return self.shard_numel * self.param_dtype.itemsize

    @property
    def full_nbytes(self) -> int:
        """Bytes of the whole flat param while it is gathered."""
        return self.layout.padded_numel * self.compute_dtype.itemsize

    @property
    def grad_nbytes(self) -> int:
        """Bytes of the gradient of one rank's shard; 0 if frozen."""
        return self.shard_nbytes if self.requires_grad else 0


@dataclass(frozen=True)
class UnitRow:
    """One unit: ``numel`` elements, ``shard_nbytes`` on each rank, ``full_nbytes`` while gathered.

    ``grad_nbytes`` is the size of the gradient of a rank's shard, in the shard's dtype.
    """

    fqn: str
    numel: int
    shard_nbytes: int
    full_nbytes: int
    grad_nbytes: int


def unit_row(fqn: str, flats: Sequence[FlatSizes]) -> UnitRow:
    """The row of a unit with the flat params ``flats``."""
    return UnitRow(
        fqn,
        sum(flat.layout.numel for flat in flats),
        sum(flat.shard_nbytes for flat in flats),
        sum(flat.full_nbytes for flat in flats),
        sum(flat.grad_nbytes for flat in flats),
    )


def unit_table(model: nn.Module) -> list[UnitRow]:
    """One row per unit below ``model``, outermost first; no communication."""
    rows = []
    for fqn, unit in units_below(model):
        flats = [
            FlatSizes(
                fp.line.layout,
                fp.shard.dtype,
                fp.compute_dtype_under(unit.rule),
                fp.shard.requires_grad,
                fp.line.rank,
            )
            for fp in unit.flat_params
        ]
        rows.append(unit_row(fqn, flats))
    return rows


def unit_lines(rows: Sequence[UnitRow]) -> list[str]:
    """The units as a table, with a warning if one holds more than half of the model."""
    sums = [sum(figures) for figures in zip(*(astuple(row)[1:] for row in rows), strict=True)]
    cells: list[tuple[str, ...]] = [("unit", "parameters", "shard", "whole", "gradient")]
    for name, numel, *sizes in (*map(astuple, rows), ("all", *sums)):
        cells.append((name or "(root)", f"{numel:,}", *map(size_text, sizes)))
    warning = large_unit_warning(rows)
    return [*table(cells, "<>>>>"), *([f"warning: {warning}"] if warning else [])]


def large_unit_warning(rows: Sequence[UnitRow]) -> str | None:
    """Warning about a unit that holds more than half of the model; None if no unit does."""
    numel = sum(row.numel for row in rows)
    largest = max(rows, key=lambda row: row.numel)
    if 2 * largest.numel <= numel:
        return None
    return (
        f"unit {largest.fqn or '(root)'} holds {largest.numel / numel:.0%} of the parameters; all of them are in "
        "memory while it computes. Wrap parts of it."
    )
