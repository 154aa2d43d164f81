"""Conversions of a sharded module (``to``, ``half``, ``share_memory``) that would do something else than they say."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fairshard.engine.unit import Unit
from fairshard.utils.names import join


def check_conversion(unit: Unit, fn: Callable[[Tensor], Tensor]) -> None:
    """Raise if ``fn``, which will be applied to all tensors, changes the dtype or device of a unit that has run.

    Raises:
        TypeError: ``fn`` changes one of them, or moves flat shards to the meta device, whatever has run.
    """
    if unit.root is None and unit.members is not None:
        return
    for flat_param in unit.flat_params:
        shard = flat_param.shard
        changed = fn(shard.data.new_empty(0))
        if changed.is_meta and not shard.is_meta and unit.members is None:
            raise TypeError(
                f"A wrapped model must keep its values, but `{join(unit.fqn, flat_param.name)}` would go to the meta "
                "device, which has none, and a shard cannot be initialised again. To build a model without memory, "
                "make the module on the meta device before wrapping, and pass `param_init_fn`."
            )
        if unit.root is None:
            continue
        if changed.dtype != shard.dtype or changed.device != shard.device:
            raise TypeError(
                f"Dtype and device must be fixed before the first forward, but `{flat_param.name}` would "
                f"go from {shard.dtype} on {shard.device} to {changed.dtype} on {changed.device}. Convert "
                "the module before sharding it, or use mixed precision (`mixed_precision=True` of "
                "FullyShardedDataParallel, `mp_policy` of fully_shard)."
            )


def refuse_sharing(fn: Callable[[Tensor], Tensor]) -> None:
    """Raise if ``fn``, which will be applied to DTensors, shares memory between processes.

    torch (to 2.13) then reads the storage of a DTensor, which has none, and the process ends by a segmentation fault.

    Raises:
        TypeError: ``fn`` shares memory.
    """
    shared = fn(torch.empty(1, device="cpu"))
    if shared.device.type == "cpu" and shared.is_shared():
        raise TypeError(
            "Memory that processes share must be that of plain tensors, but `share_memory()` was called on a module "
            "that fully_shard has sharded, whose parameters are DTensors. Copy the rows of this rank and share the "
            "copies: `param.to_local().detach().clone().share_memory_()`."
        )
