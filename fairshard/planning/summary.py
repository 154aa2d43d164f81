"""Sizes of the units of a wrapped model, and a table of them."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fairshard.engine.tree import units_below
from fairshard.params.rule import GradHome
from fairshard.utils.layout import FlatLayout
from fairshard.utils.placed_layout import OwnedLayout
from fairshard.utils.size_text import size_text
from fairshard.utils.subclasses import inner_tensors
from fairshard.utils.table import table
from fairshard.views.extended_param import ShownExtended

__all__ = [
    "FlatSizes",
    "StateBytes",
    "UnitRow",
    "copy_wait_s",
    "large_unit_warning",
    "state_bytes",
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


@dataclass(frozen=True)
class StateBytes:
    """Bytes of this rank's shards, gradients and optimizer state, by kind of memory."""

    device: int
    pinned: int
    pageable: int


def state_bytes(model: nn.Module, optimizer: Optimizer) -> StateBytes:
    """Bytes of the current state of ``model`` and ``optimizer``, by kind of memory; no communication."""
    device: list[Tensor] = []
    host: list[Tensor] = []
    for _, unit in units_below(model):
        for flat_param in unit.flat_params:
            shows, grad, pending = flat_param.shows, flat_param.grad, flat_param.pending
            values = inner_tensors(shows.local) if isinstance(shows, ShownExtended) else [shows.shard.detach()]
            (host if shows.on_cpu else device).extend(values)
            device += [] if flat_param.device_shard is None else [flat_param.device_shard]
            device += [] if pending is None or pending.shard_sum is None else [pending.shard_sum]
            if grad is not None:
                (host if grad.home is GradHome.HOST else device).extend(grad.tensors())
            states = [optimizer.state.get(stepped.shard, {}) for stepped in flat_param.stepped]
            moments = [value for state in states for value in state.values() if isinstance(value, Tensor)]
            own = [value.to_local() if isinstance(value, DTensor) else value for value in moments]
            (host if shows.on_cpu else device).extend(own)
    pinned = sum(tensor.nbytes for tensor in host if tensor.is_pinned())
    return StateBytes(sum(tensor.nbytes for tensor in device), pinned, sum(tensor.nbytes for tensor in host) - pinned)


def copy_wait_s(model: nn.Module) -> float:
    """Seconds for which the host has waited for copies to and from its memory since ``model`` was first called."""
    roots = {unit.root for _, unit in units_below(model) if unit.root is not None}
    return float(sum(root.shared.transfers.waited_s for root in roots))


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
    return [
        unit_row(
            fqn,
            [
                FlatSizes(
                    fp.line.layout,
                    fp.shard.dtype,
                    fp.compute_dtype_under(unit.rule),
                    fp.shard.requires_grad,
                    fp.line.rank,
                )
                for fp in unit.flat_params
            ],
        )
        for fqn, unit in units_below(model)
    ]


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
