"""Other engines around a module that is already sharded: refused by name, before they communicate."""

from __future__ import annotations

from types import FrameType

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from fairshard.engine.tree import units_below
from fairshard.engine.unit import Unit
from fairshard.utils.names import join

_TORCHS = "torch.distributed.fsdp._fully_shard"
_is_watching = False


def watch_ddp() -> None:
    """From now on, raise when DistributedDataParallel gets a module with units that share ranks with it."""
    global _is_watching
    if not _is_watching:
        register_module_module_registration_hook(_on_module)
        _is_watching = True


def _on_module(module: nn.Module, name: str, submodule: nn.Module) -> None:
    if name != "module" or not isinstance(module, DistributedDataParallel):
        return
    ranks = set(dist.get_process_group_ranks(module.process_group))
    for fqn, unit in units_below(submodule):
        group = unit.groups.shard.group
        shared = [] if group is None else sorted(ranks.intersection(dist.get_process_group_ranks(group)))
        if len(shared) > 1:
            raise ValueError(
                "DistributedDataParallel must be given other ranks than those that a unit is sharded over, but unit "
                f"`{fqn or 'root'}` is sharded over its ranks {shared}: it would average different parts of the "
                "parameters. Leave DistributedDataParallel out, because gradients of shards are averaged already. For "
                "replicas of a sharded model, use hybrid sharding."
            )


def refuse_torchs_sharding(unit: Unit, caller: FrameType | None) -> None:
    """Raise if ``caller``, which asks for the own parameters of a module of ``unit``, is torch's ``fully_shard``.

    Raises:
        ValueError: it would shard the shards.
    """
    if caller is not None and caller.f_globals.get("__name__", "").startswith(_TORCHS):
        names = [join(unit.fqn, slot.fqn) for flat_param in unit.flat_params for slot in flat_param.slots]
        place = names[0] if names else unit.fqn
        raise ValueError(
            "torch.distributed.fsdp.fully_shard must be given modules that are not sharded, but the unit of "
            f"`{place}` has been sharded by fairshard. Shard the outer modules with fairshard too, "
            "or the inner ones with torch."
        )
