"""Refuses what a module cannot do while shards, or nothing, are registered in place of its parameters.

A forward of such a module would compute with shards. A state dict of a module inside a wrapper would lack parameters
or not name them: only the wrapper can gather them, and gathering is collective. A module inside is often asked on one
rank alone (``if rank == 0: torch.save(model.module.state_dict(), path)``): then an error is better than a gather that
never ends. Hooks on modules refuse both. A conversion (``to``, ``half``, ``share_memory``) would do something else than
it says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fairshard.engine.training_state import TrainingState
from fairshard.engine.unit import Unit
from fairshard.errors import ParameterShardedError
from fairshard.params.flat_param import FlatParam
from fairshard.params.placeholder import read_error
from fairshard.params.slot import ParamSlot
from fairshard.settings.check import require
from fairshard.utils.dynamo import not_traced
from fairshard.utils.names import join


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


def refuse_inner_states(own: Sequence[tuple[str, nn.Module]], unit: Unit) -> None:
    """From now on, saving or loading a state dict of a module of ``unit`` raises unless its parameters are shown.

    ``own``: these modules, those of `paths_of`. The hooks are on all modules around the parameters, so that they raise
    before a wrapper inside gathers.
    """
    places = {
        (id(owner), name): (owner, name, slot)
        for flat_param in unit.flat_params
        for slot in flat_param.slots
        for owner, name in slot.owners
    }
    params = {
        join(path, name): places[id(module), name]
        for path, module in own
        for name in module._parameters
        if (id(module), name) in places
    }
    for path, module in own:
        start = f"{path}." if path else ""
        inside = {key[len(start) :]: place for key, place in params.items() if key.startswith(start)}
        if inside:
            guard = _StateGuard(unit, inside)
            module.register_state_dict_pre_hook(guard.before_save)
            module.register_load_state_dict_pre_hook(guard.before_load)


class _StateGuard:
    """Hooks on a module that has parameters of ``unit`` ``inside``: by name, the module, its name there, the slot."""

    def __init__(self, unit: Unit, inside: dict[str, tuple[nn.Module, str, ParamSlot]]) -> None:
        self._unit, self._inside = unit, inside

    def before_save(self, module: nn.Module, _prefix: str, _keep_vars: bool) -> None:
        """Raise if the state dict would lack parameters, or have shards in their place."""
        for _, fqn in self._sharded():
            raise ParameterShardedError(
                f"The state dict of a module inside a wrapper would lack its sharded parameters, such as `{fqn}`. Call "
                "`state_dict()` of the wrapper, on all ranks (and pass the result on: "
                "`save_pretrained(folder, state_dict=...)`), or do this inside `summon_full_params()`."
            )

    def before_load(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Raise if ``state`` has values of parameters that are sharded now."""
        for key, fqn in self._sharded():
            if prefix + key in state:
                raise ParameterShardedError(
                    f"A state dict must be loaded by the wrapper while parameters are sharded, but `{fqn}` would be "
                    "loaded by a module inside it. Call `load_state_dict()` of the wrapper, on all ranks, or do this "
                    "inside `summon_full_params()`."
                )

    def _sharded(self) -> Iterator[tuple[str, str]]:
        """Keys and fqns of the parameters in whose places modules have nothing, or shards of other shapes, now."""
        is_shown = self._unit.state is TrainingState.SUMMON_FULL_PARAMS
        for key, (module, name, slot) in () if is_shown else self._inside.items():
            shown, params = slot.registered, module._parameters
            if name in params and params[name] is shown and (shown is None or shown.shape != slot.shape):
                yield key, slot.fqn


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
        require(
            unit.members is not None or shard.is_meta or not changed.is_meta,
            f"A wrapped model must keep its values, but `{join(unit.fqn, flat_param.name)}` would go to the meta "
            "device, which has none, and a shard cannot be initialised again. To build a model without memory, make "
            "the module on the meta device before wrapping, and pass `param_init_fn`.",
            TypeError,
        )
        require(
            unit.root is None or (changed.dtype == shard.dtype and changed.device == shard.device),
            f"Dtype and device must be fixed before the first forward, but `{flat_param.name}` would go from "
            f"{shard.dtype} on {shard.device} to {changed.dtype} on {changed.device}. Convert the module before "
            "sharding it, or use mixed precision (`mixed_precision=True` of FullyShardedDataParallel, `mp_policy` of "
            "fully_shard).",
            TypeError,
        )


def refuse_sharing(fn: Callable[[Tensor], Tensor]) -> None:
    """Raise if ``fn``, which will be applied to DTensors, shares memory between processes.

    torch (to 2.13) then reads the storage of a DTensor, which has none, and the process ends by a segmentation fault.

    Raises:
        TypeError: ``fn`` shares memory.
    """
    shared = fn(torch.empty(1, device="cpu"))
    require(
        shared.device.type != "cpu" or not shared.is_shared(),
        "Memory that processes share must be that of plain tensors, but `share_memory()` was called on a module that "
        "fully_shard has sharded, whose parameters are DTensors. Copy the rows of this rank and share the copies: "
        "`param.to_local().detach().clone().share_memory_()`.",
        TypeError,
    )
