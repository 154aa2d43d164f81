"""Refuses to compute with shards: a hook on modules where shards are registered in place of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fairshard.errors import ParameterShardedError
from fairshard.params.flat_param import FlatParam
from fairshard.params.placeholder import read_error
from fairshard.params.slot import ParamSlot
from fairshard.utils.dynamo import not_traced


class _Guard:
    """A hook before the forward of a module on which shards are registered in place of the parameters of ``slots``.

    Raises `ParameterShardedError` for the first that is not gathered: torch would name neither the module nor the
    remedy, or would compute with a shard whose shape happens to fit.
    """

    def __init__(self) -> None:
        self.slots: dict[str, ParamSlot] = {}

    @not_traced
    def __call__(self, module: nn.Module, _args: Any) -> None:
        params = module._parameters
        for name, slot in self.slots.items():
            if params.get(name) is slot.registered:
                self._refuse(slot)

    @staticmethod
    def _refuse(slot: ParamSlot) -> None:
        if not isinstance(slot.registered, DTensor):
            raise read_error(slot.fqn)
        raise ParameterShardedError(
            f"Parameter `{slot.fqn}` must be gathered to be read, but only its shards exist outside of its unit's "
            f"forward and backward: `{slot.fqn.rpartition('.')[0] or 'the root'}` was not reached through a module "
            "that fully_shard was called on. Call that module; or make the method that was called gather the "
            'parameters, with `fairshard.nn.register_fsdp_forward_method(module, "name")`.'
        )


def guard_of(module: nn.Module) -> _Guard | None:
    """The guard of ``module``, if shards are registered on it in place of parameters."""
    return next((hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _Guard)), None)


def guard_modules(flat_params: Sequence[FlatParam]) -> None:
    """Guard the modules on which shards are registered in place of the parameters of ``flat_params``."""
    for slot in (slot for flat_param in flat_params for slot in flat_param.slots if slot.registered is not None):
        for module, name in slot.owners:
            guard = guard_of(module)
            if guard is None:
                guard = _Guard()
                module.register_forward_pre_hook(guard)
            guard.slots[name] = slot
