"""The units of a wrapped model as figures."""

from dataclasses import dataclass

from torch import nn

from fairshard.nn.data_parallel.tree import join, units_below


@dataclass(frozen=True)
class UnitRow:
    """One unit: ``numel`` parameters, stored as ``shard_nbytes`` on each rank, ``full_nbytes`` while gathered."""

    fqn: str
    numel: int
    shard_nbytes: int
    full_nbytes: int


def unit_table(model: nn.Module) -> list[UnitRow]:
    """A row for each unit below ``model``, outermost first; no communication."""
    rows = []
    for fqn, unit in units_below(model):
        rows.append(
            UnitRow(
                join("", fqn),
                sum(flat_param.layout.numel for flat_param in unit.flat_params),
                sum(flat_param.shard.nbytes for flat_param in unit.flat_params),
                sum(
                    flat_param.layout.padded_numel * flat_param.compute_dtype_under(unit.config).itemsize
                    for flat_param in unit.flat_params
                ),
            )
        )
    return rows
