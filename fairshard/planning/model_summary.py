"""The units of a sharded model: their sizes, how they are cut, and the dtype in which they compute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from fairshard.engine.tree import is_wrapper, unit_of, walk
from fairshard.engine.unit import Unit
from fairshard.params.flat_param import FlatParam
from fairshard.params.rule import GradHome
from fairshard.planning.summary import UnitRow, large_unit_warning, unit_table
from fairshard.setup.arguments import units_to
from fairshard.utils.buckets import MB
from fairshard.utils.layout import FlatLayout
from fairshard.utils.placed_layout import OwnedLayout, RaggedLayout, RowsLayout
from fairshard.utils.table import table

__all__ = ["ModelSummary", "UnitSummary", "summary"]

_COLUMNS = (
    *("unit", "module", "parameters", "shard MB", "gathered MB", "gradient MB"),
    *("sharded", "cut", "weights", "compute", "reduce", "state on"),
)
_SIDES = "<<>>>><<<<<<"


@dataclass(frozen=True)
class UnitSummary:
    """One unit: its ``sizes``, and in words what its parameters have in common.

    Attributes:
        module: class of the module that was sharded.
        strategy: name of the strategy, and the number of ranks and replicas.
        placement: where cuts may fall: ``flat``, ``rows``, ``row blocks``, ``owned``.
        param_dtype: dtype of the shards, of their gradients and of the optimizer's state.
        compute_dtype: dtype in which they are gathered and compute.
        reduce_dtype: dtype in which gradients are summed.
        state: the device of the shards, of their gradients if it is another one, and of the optimizer's state.
    """

    sizes: UnitRow
    module: str
    strategy: str
    placement: str
    param_dtype: str
    compute_dtype: str
    reduce_dtype: str
    state: str

    def cells(self) -> tuple[str, ...]:
        """Its row in the table."""
        words = (self.strategy, self.placement, self.param_dtype, self.compute_dtype, self.reduce_dtype, self.state)
        return (self.sizes.fqn or "(root)", self.module, *_figures([self.sizes]), *words)


@dataclass(frozen=True)
class ModelSummary:
    """The units of a sharded model on this rank, outermost first; printed, a table of them."""

    units: tuple[UnitSummary, ...]

    @property
    def warning(self) -> str | None:
        """A unit that holds more than half of the model; None if no unit does."""
        return large_unit_warning([unit.sizes for unit in self.units])

    def _rows(self) -> list[tuple[str, ...]]:
        all_units = ("all", "", *_figures([unit.sizes for unit in self.units]))
        cells = [unit.cells() for unit in self.units]
        return [_COLUMNS, *cells, (*all_units, *[""] * (len(_COLUMNS) - len(all_units)))]

    def __str__(self) -> str:
        return "\n".join([*table(self._rows(), _SIDES), *([f"warning: {self.warning}"] if self.warning else [])])


def summary(model: nn.Module) -> ModelSummary:
    """The units of a model sharded by either entry point: sizes, strategy, precision, placement, where state lives.

    Sizes are of this rank; a MB is 2**20 bytes. No communication.

    >>> import torch, fairshard
    >>> blocks = [fairshard.FSDP(torch.nn.Linear(8, 8)) for _ in range(2)]
    >>> found = fairshard.summary(fairshard.FSDP(torch.nn.Sequential(*blocks)))
    >>> [(unit.sizes.fqn, unit.module, unit.sizes.numel) for unit in found.units]
    [('', 'Sequential', 0), ('0', 'Linear', 72), ('1', 'Linear', 72)]

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``model`` contains no unit.
    """
    cure = "Shard it first, or call fairshard.plan for what sharding it would give."
    units = units_to("to have a summary", model, cure)
    classes: dict[Unit, list[str]] = {}
    for _, part in walk(model):
        if (unit := unit_of(part)) is not None:
            sharded = part.module if is_wrapper(part) else part
            classes.setdefault(unit, []).append(getattr(sharded, "_fairshard_class", type(sharded)).__name__)
    found = zip(unit_table(model), units, strict=True)
    return ModelSummary(tuple(_summary_of(row, unit, _joined(classes[unit])) for row, unit in found))


def _summary_of(row: UnitRow, unit: Unit, module: str) -> UnitSummary:
    params, config = unit.flat_params, unit.config
    shards, replicas = unit.groups.shard.world_size, unit.groups.replicas
    over = f"{config.sharding_strategy.name} over {shards}"
    if replicas is not None:
        over += f" x {replicas.world_size}"
    computed = [flat_param.compute_dtype_under(config.rule) for flat_param in params]
    return UnitSummary(
        row,
        module,
        over,
        _joined(_placement(flat_param.line.layout) for flat_param in params),
        _joined(_name(flat_param.shard.dtype) for flat_param in params),
        _joined(map(_name, computed)),
        _joined(_name(config.rule.reduce_dtype_of(dtype)) for dtype in computed),
        _joined(_state(flat_param, unit) for flat_param in params),
    )


def _placement(layout: FlatLayout) -> str:
    kinds = ((OwnedLayout, "owned"), (RaggedLayout, "row blocks"), (RowsLayout, "rows"))
    return next((word for kind, word in kinds if isinstance(layout, kind)), "flat")


def _state(flat_param: FlatParam, unit: Unit) -> str:
    if not flat_param.shows.on_cpu:
        return str(flat_param.shard.device)
    held = unit.config.rule.grad_home is GradHome.HELD
    return f"host, gradients on {unit.origin.device}" if held else "host"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _joined(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _figures(rows: list[UnitRow]) -> tuple[str, ...]:
    sizes = zip(*((row.shard_nbytes, row.full_nbytes, row.grad_nbytes) for row in rows), strict=True)
    return (f"{sum(row.numel for row in rows):,}", *(f"{sum(size) / MB:,.2f}" for size in sizes))
