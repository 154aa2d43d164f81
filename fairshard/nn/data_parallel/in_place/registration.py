"""Parameters registered in a model after `fully_shard`: DTensors are adopted, other trainable parameters raise.

torch calls these functions whenever a module of this process gets a parameter or a submodule, except in
``functional_call``, which replaces parameters for one call.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fairshard.checks.optimizer_check import stepped_of
from fairshard.engine.tree import unit_of, walk
from fairshard.errors import FairshardError
from fairshard.params.slot import sharded_param_of, slot_of
from fairshard.setup.added_parameters import call_on_registration, refusal_of_new
from fairshard.utils.names import join
from fairshard.views.orig_param import OrigParam


def watch_registrations() -> None:
    """From now on, check parameters and modules that are registered in units of `fully_shard`."""
    call_on_registration(_on_parameter, _on_module)


def _on_parameter(module: nn.Module, name: str, param: nn.Parameter) -> Any:
    """Return the parameter to register instead of ``param``; None registers ``param`` itself."""
    unit = unit_of(module)
    is_in_place = unit is not None and unit.members is not None
    if not is_in_place and not module._forward_pre_hooks:
        return None
    old = module._parameters.get(name)
    if param is old:
        return None
    slot = None if old is None else slot_of(old)  # inside a forward, `_parameters` holds the leaf
    old = old if slot is None else slot.registered
    stepped = stepped_of(old)
    if old is not None and stepped is None:
        return None  # it replaces an ignored parameter
    if isinstance(stepped, OrigParam) and isinstance(old, DTensor):
        other = stepped_of(param)
        if isinstance(other, OrigParam):
            raise FairshardError(
                f"Weights must be tied before they are sharded, but sharded parameter `{other.name}` was assigned to "
                f"`{stepped.name}`: each has its own shards, and would be trained by itself. Tie them before "
                "`fully_shard`; to copy the values, call `copy_` under `torch.no_grad()`."
            )
        if isinstance(param, DTensor):
            return stepped.adopt(param)
        raise FairshardError(
            f"Parameter `{stepped.name}` must stay a DTensor once it is sharded, but was replaced by an unsharded one, "
            "which every rank would train separately. Copy the values into it "
            "(`with torch.no_grad(): param.copy_(distribute_tensor(values, param.device_mesh, param.placements))`), or "
            "load a state dict."
        )
    place = _place_of(module)
    if place is None and is_in_place and unit is not None:
        place = unit.fqn
    if place is not None:
        raise FairshardError(refusal_of_new(join(place, name)))
    return None


def _place_of(module: nn.Module) -> str | None:
    """The fqn of ``module`` if `fully_shard` has sharded parameters of it; otherwise None."""
    is_in_place = any(param is not None and _is_dtensor(param) for param in module._parameters.values())
    fqn = sharded_param_of(module) if is_in_place else None
    return None if fqn is None else fqn.rpartition(".")[0]


def _is_dtensor(param: nn.Parameter) -> bool:
    """Whether ``param`` is a DTensor that `fully_shard` has registered, or stands in the place of one now."""
    slot = slot_of(param)
    shown = param if slot is None else slot.registered
    return isinstance(shown, DTensor) and bool(stepped_of(shown))


def _on_module(module: nn.Module, name: str, submodule: nn.Module) -> None:
    unit = unit_of(module)
    if unit is None or unit.members is None or unit.root is None or submodule is None:
        return
    if any(part is module and place == name for part, place in unit.origin.ignored_places):
        return
    known = unit.origin.ignored.ids
    for fqn, part in walk(submodule):
        for own_name, param in part._parameters.items():
            if param is not None and id(param) not in known and stepped_of(param) is None:
                raise FairshardError(refusal_of_new(join(join(unit.fqn, name), join(fqn, own_name))))
