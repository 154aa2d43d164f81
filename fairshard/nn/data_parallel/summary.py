"""The units of a wrapped model as figures."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from fairshard.nn.data_parallel.tree import join, units_below


@dataclass(frozen=True)
class UnitRow:
    """One unit: ``numel`` parameters, stored as ``shard_nbytes`` on each rank, ``full_nbytes`` while gathered."""

    fqn: str
    numel: int
    shard_nbytes: int
    full_nbytes: int


@dataclass(frozen=True)
class StateBytes:
    """Bytes of this rank's shards, gradients and optimizer state, by where they are."""

    device: int
    pinned: int
    pageable: int


def state_bytes(model: nn.Module, optimizer: Optimizer) -> StateBytes:
    """Where the state of ``model`` and ``optimizer`` is kept now; no communication."""
    device, host = [], []
    for _, unit in units_below(model):
        for flat_param in unit.flat_params:
            here, there = flat_param.state_tensors()
            device += here
            host += there
            moments = [v for v in optimizer.state.get(flat_param.shard, {}).values() if isinstance(v, Tensor)]
            (host if flat_param.on_cpu else device).extend(moments)
    pinned = sum(tensor.nbytes for tensor in host if tensor.is_pinned())
    return StateBytes(sum(tensor.nbytes for tensor in device), pinned, sum(tensor.nbytes for tensor in host) - pinned)


def copy_wait_s(model: nn.Module) -> float:
    """Seconds that the host has waited for copies to and from its memory since ``model`` was first called."""
    roots = {unit.root for _, unit in units_below(model) if unit.root is not None}
    return sum(root.transfers.waited_s for root in roots)


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
