"""Clipping of gradients that are sharded over ranks."""

import math

import torch
from torch import Tensor

from fairshard.checks.nan_check import NanCheck
from fairshard.checks.whole_grads import check_whole
from fairshard.engine.unit import Unit
from fairshard.errors import MixedGroupsError
from fairshard.params.dtensor_slot import DTensorSlot
from fairshard.utils.collectives import Communicator
from fairshard.utils.groups import communicator
from fairshard.utils.rank_norms import largest_norms
from fairshard.utils.tensors import norm_of


def exceeds(norm: Tensor, max_norm: float) -> bool:
    """Whether gradients of norm ``norm`` are scaled down; False if the norm is NaN."""
    return bool(max_norm / (norm + 1e-6) < 1)


@torch.no_grad()
def clip_grad_norm_(units: list[Unit], max_norm: float, norm_type: float) -> Tensor:
    """Scale the shards' gradients so that their norm over all ranks is at most ``max_norm``; return the old norm.

    Ignored parameters have whole gradients that differ across ranks: their contribution is averaged over ranks.

    **Collective.** The norm is fp32 (fp64 for fp64 gradients), 0-d, on the compute device, equal on all ranks.
    Gradients do not change if their norm is below ``max_norm``.

    Raises:
        MixedGroupsError: the units use several process groups.
        PendingGradientError: a gradient waits to be reduced; see `check_whole`.
        ValueError: ``norm_type`` is not positive, or a parameter is a DTensor on a larger mesh than its unit's.
    """
    if not norm_type > 0:
        raise ValueError(f"`norm_type` must be positive or math.inf, but is {norm_type}. Pass 2.0 for the usual norm.")
    _check_groups(units)
    _check_plain(units)
    for flat_param in (flat_param for unit in units for flat_param in unit.flat_params):
        check_whole(flat_param)
    grads: list[Tensor] = []
    filled: dict[Communicator, list[Tensor]] = {}
    for unit in units:
        assert unit.comm is not None
        parts = filled.setdefault(unit.comm, [])
        for flat_param in unit.flat_params:
            grad = flat_param.grad.value
            if grad is not None:
                grads += [own for one in flat_param.stepped if (own := one.grad.value) is not None]
                parts += [grad[span.start : span.stop] for span in flat_param.line.layout.counted(unit.comm.rank)]
    # From the shards, not the gradients: a rank without gradients must reduce in the same dtype as the others.
    is_double = any(fp.shard.dtype == torch.float64 for unit in units for fp in unit.flat_params)
    zero = torch.zeros((), dtype=torch.float64 if is_double else torch.float32, device=units[0].device)
    norms = [_over_ranks(norm_of(parts, norm_type).to(zero), norm_type, comm) for comm, parts in filled.items()]
    if ignored := {id(param): param for unit in units for param in unit.origin.ignored.params}:
        whole = [param.grad for param in ignored.values() if param.grad is not None]
        grads += whole
        norm = norm_of(whole, norm_type).to(zero)
        for comm in map(communicator, units[0].groups.spanning()):
            norm = _over_ranks(norm, norm_type, comm, is_mean=True)
        norms.append(norm)
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    root = units[0].root
    assert root is not None
    NanCheck.of(root).warn_once(total)
    if grads and exceeds(total, max_norm):
        factor = max_norm / (total + 1e-6)
        for device in dict.fromkeys(grad.device for grad in grads):
            torch._foreach_mul_([grad for grad in grads if grad.device == device], factor.to(device))
    return total


def _over_ranks(own: Tensor, norm_type: float, comm: Communicator, is_mean: bool = False) -> Tensor:
    """The norm of what all ranks have together, or if ``is_mean`` of the mean of their powers. **Collective.**"""
    if math.isinf(norm_type):
        return largest_norms(own, comm)
    power = own**norm_type
    comm.all_reduce(power, "sum").wait()
    return (power / comm.world_size if is_mean else power) ** (1.0 / norm_type)


def _check_plain(units: list[Unit]) -> None:
    for unit in units:
        for flat_param in unit.flat_params:
            for slot in flat_param.slots:
                if isinstance(slot, DTensorSlot):
                    raise ValueError(
                        "Gradients must be sharded over data-parallel ranks only to be clipped here, but those of "
                        f"`{slot.fqn}` are also on {slot.spec.mesh}. Leave `clip_grad_norm` out, and call "
                        "`torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)` before `step()`."
                    )


def _check_groups(units: list[Unit]) -> None:
    """Check that all gradients are means over the same ranks, so that one factor scales them all."""
    for unit in units:
        if unit.groups.spanning() != units[0].groups.spanning():
            raise MixedGroupsError(
                "clip_grad_norm_ needs one process group for all units, or one pair with replicas, but "
                f"`{unit.fqn}` has another one than the root. Pass the same `process_group` (`mesh` of fully_shard) to "
                "both; or use torch.nn.utils.clip_grad_value_, or compute the norms group by group."
            )
