"""Parameters that appear in a model after it was sharded: refused by name at the next forward.

torch calls the hooks of this file whenever a module of this process gets a parameter or a submodule, except in
``functional_call``, which replaces parameters for one call. They only count, so that a forward walks the model again
only after a change.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from fairshard.checks.optimizer_check import stepped_of
from fairshard.engine.tree import is_wrapper, paths_of, unit_of, walk
from fairshard.engine.unit import Unit
from fairshard.errors import FairshardError
from fairshard.params.slot import ParamSlot, sharded_param_of, slot_of
from fairshard.setup.around import watch_ddp
from fairshard.utils.failures import reported
from fairshard.utils.names import join

_num_changes = 0
_watching: set[Callable[..., Any]] = set()
# By `id` of a module: the names of its sharded parameters that were replaced.
_replaced: dict[int, tuple[weakref.ref[nn.Module], set[str]]] = {}


def watch_additions() -> None:
    """From now on, count parameters and modules that are registered anywhere in this process."""
    call_on_registration(_on_parameter, _on_module)


def call_on_registration(on_parameter: Callable[..., Any], on_module: Callable[..., Any]) -> None:
    """From now on, call these functions for each parameter and submodule that a module of this process gets.

    Also refuses DistributedDataParallel over the ranks of a unit.
    """
    if on_parameter not in _watching:
        register_module_parameter_registration_hook(on_parameter)
        register_module_module_registration_hook(on_module)
        _watching.add(on_parameter)
    watch_ddp()


def check_added(module: nn.Module, unit: Unit) -> None:
    """Check the units in ``module``, whose outermost is ``unit``, if anything was registered since the last check.

    Raises:
        FairshardError: a parameter was added to a unit, or replaces a sharded one.
    """
    if unit.origin.num_changes != _num_changes:
        try:
            check_all_known(module)
        except FairshardError as error:
            raise reported(error) from None
        unit.origin.num_changes = _num_changes


def check_all_known(module: nn.Module) -> None:
    """Check every parameter of the units in ``module``.

    Raises:
        FairshardError: see `check_added`.
    """
    holders = [(holder, unit) for _, holder in walk(module) if (unit := unit_of(holder)) is not None]
    slots = {
        (id(owner), name): slot
        for _, unit in holders
        for flat_param in unit.flat_params
        for slot in flat_param.slots
        for owner, name in slot.owners
    }
    for holder, unit in holders:
        ignored = unit.origin.ignored.ids
        places = {(id(part), name) for part, name in unit.origin.ignored_places}
        parts = ([("", holder)] if is_wrapper(holder) else []) + paths_of(holder)
        # Ignored modules may be changed and replaced: what is in their places now is ignored too.
        free = [part for _, part in parts if id(part) in ignored]
        free += [part for owner, name in unit.origin.ignored_places if (part := owner._modules.get(name)) is not None]
        within = {id(inner) for part in free for inner in part.modules()}
        for path, part in parts:
            if id(part) in within:
                continue
            for name, param in part._parameters.items():
                place = id(part), name
                if param is None or id(param) in ignored or place in places:
                    continue
                if _is_new(part, name, param, slots.get(place)):
                    raise FairshardError(refusal_of_new(join(unit.fqn, join(path, name)), is_wrapper(holder)))


def _is_new(module: nn.Module, name: str, param: nn.Parameter, slot: ParamSlot | None) -> bool:
    if slot is None:
        return stepped_of(param) is None and slot_of(param) is None
    if slot.holds(param):
        return False
    # Another tensor under a known name may be there for one call only (functional_call).
    reference, names = _replaced.get(id(module), (None, ()))
    is_replaced = reference is not None and reference() is module and name in names
    return is_replaced or (isinstance(param, DTensor) and slot.registered is not None)


def refusal_of_new(fqn: str, in_wrapper: bool = False) -> str:
    """The error message for a parameter that was added to a sharded model."""
    how = (
        "Add it before wrapping, or wrap the model with its module in `ignored_modules`; to change the values of a "
        "parameter copy them into it inside `summon_full_params`, or load a state dict."
        if in_wrapper
        else "Add it before fully_shard, or name it in `ignored_params`; to change the values of a parameter copy them "
        "into it, or load a state dict."
    )
    return (
        f"A model must have all its parameters when it is sharded, but `{fqn}` was added later: each rank would train "
        f"its own copy. {how}"
    )


def _on_parameter(module: nn.Module, name: str, param: nn.Parameter) -> None:
    global _num_changes
    if module._parameters.get(name) is param:
        return
    _num_changes += 1
    if name in module._parameters and sharded_param_of(module) is not None:
        _note_replaced(module, name)


def _on_module(module: nn.Module, name: str, submodule: nn.Module) -> None:
    global _num_changes
    _num_changes += 1


def _note_replaced(module: nn.Module, name: str) -> None:
    key = id(module)

    def forget(reference: weakref.ref[nn.Module]) -> None:
        if key in _replaced and _replaced[key][0] is reference:
            del _replaced[key]

    reference, names = _replaced.get(key, (None, set[str]()))
    if reference is None or reference() is not module:
        names = set()
        _replaced[key] = weakref.ref(module, forget), names
    names.add(name)
