"""Parameters that appear in a model after it was sharded: refused by name.

When a pass begins, the modules and the parameters that the model has are compared with those of the last check, in some
50 ns each. If they are others, every parameter is looked at.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fairshard.checks.shards import stepped_of
from fairshard.engine.tree import is_wrapper, paths_of, unit_of, walk
from fairshard.engine.unit import Unit
from fairshard.errors import FairshardError
from fairshard.params.slot import ParamSlot, slot_of
from fairshard.utils.failures import reported
from fairshard.utils.names import join


class Known:
    """What ``module`` had at the last check: the submodules and the parameters of each module below it, in order."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        parts = [part for _, part in walk(module)]
        self._views: list[Any] = [entries.values() for part in parts for entries in (part._modules, part._parameters)]
        self._values = list(chain.from_iterable(self._views))

    def is_current(self, module: nn.Module) -> bool:
        """Whether ``module`` is the same module, and has the same modules and parameters."""
        return (
            self.module is module
            and sum(map(len, self._views)) == len(self._values)
            and all(map(is_, chain.from_iterable(self._views), self._values))
        )


def has_changed(module: nn.Module, unit: Unit) -> bool:
    """Whether ``module``, the outermost of ``unit``, has changed since `check_added`."""
    known: Known | None = unit.origin.known
    return known is None or not known.is_current(module)


def check_added(module: nn.Module, unit: Unit) -> None:
    """Check the units in ``module``, whose outermost is ``unit``.

    Raises:
        FairshardError: a parameter was added to a unit, or replaces a sharded one.
    """
    unit.origin.known = None
    try:
        replaced = check_all_known(module)
    except FairshardError as error:
        raise reported(error) from None
    if not replaced:
        unit.origin.known = Known(module)


def check_all_known(module: nn.Module) -> bool:
    """Check every parameter of the units in ``module``; returns whether one has another tensor in its place.

    That tensor may be there for one call only (``functional_call``). If a backward finds it still there, and trains it,
    it raises.

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
    any_replaced = False
    for holder, unit in holders:
        for path, part, name, param in _not_ignored(holder, unit):
            slot = slots.get((id(part), name))
            if slot is not None and holds(slot, param):
                continue
            fqn = join(unit.fqn, join(path, name))
            if slot is None:
                if stepped_of(param) is None and slot_of(param) is None:
                    raise FairshardError(refusal_of_new(fqn, is_wrapper(holder)))
                continue
            _check_replacement(slot, param, fqn, is_wrapper(holder))
            any_replaced = True
            _refuse_if_trained(part, name, param, slot, fqn)
    return any_replaced


def _not_ignored(holder: nn.Module, unit: Unit) -> Iterable[tuple[str, nn.Module, str, nn.Parameter]]:
    """``(path, module, name, parameter)`` of what ``unit`` must have sharded."""
    ignored = unit.origin.ignored.ids
    places = {(id(part), name) for part, name in unit.origin.ignored_places}
    parts = ([("", holder)] if is_wrapper(holder) else []) + paths_of(holder)
    # Ignored modules may be changed and replaced: what is in their places now is ignored too.
    free = [part for _, part in parts if id(part) in ignored]
    free += [part for owner, name in unit.origin.ignored_places if (part := owner._modules.get(name)) is not None]
    within = {id(inner) for part in free for inner in part.modules()}
    for path, part in parts:
        if id(part) not in within:
            for name, param in part._parameters.items():
                if param is not None and id(param) not in ignored and (id(part), name) not in places:
                    yield path, part, name, param


def _check_replacement(slot: ParamSlot, param: nn.Parameter, fqn: str, in_wrapper: bool) -> None:
    other = stepped_of(param) if slot.registered is not None else None
    if other is not None:
        raise FairshardError(
            f"Weights must be tied before they are sharded, but sharded parameter `{other.name}` was assigned to "
            f"`{fqn}`: each has its own shards, and would be trained by itself. Tie them before sharding; to copy the "
            "values, call `copy_` under `torch.no_grad()`."
        )
    registered = slot.registered
    if isinstance(param, DTensor) and isinstance(registered, DTensor) and param.device_mesh == registered.device_mesh:
        raise FairshardError(refusal_of_new(fqn, in_wrapper))


class _Refusal:
    """Hook on a parameter: raises ``text`` if the parameter gets a gradient while it is still ``module.name``."""

    def __init__(self, module: nn.Module, name: str, text: str) -> None:
        self._module, self._name, self._text = weakref.ref(module), name, text

    def __call__(self, trained: Any) -> None:
        part = self._module()
        if part is not None and part._parameters.get(self._name) is trained:
            raise reported(FairshardError(self._text))


def _refuse_if_trained(module: nn.Module, name: str, param: nn.Parameter, slot: ParamSlot, fqn: str) -> None:
    """Make a backward raise that accumulates a gradient in ``param`` while it is still ``module.name``."""
    if not param.requires_grad or not param.is_leaf:
        return
    hooks: Any = param._post_accumulate_grad_hooks or {}
    if not any(isinstance(hook, _Refusal) for hook in hooks.values()):
        is_dtensor = isinstance(slot.registered, DTensor)
        text = _refusal_of_whole(fqn) if is_dtensor else refusal_of_new(fqn, True)
        param.register_post_accumulate_grad_hook(_Refusal(module, name, text))


def refusal_of_new(fqn: str, in_wrapper: bool) -> str:
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


def _refusal_of_whole(fqn: str) -> str:
    return (
        f"Parameter `{fqn}` must stay a DTensor once it is sharded, but was replaced by an unsharded one, which every "
        "rank would train separately. Copy the values into it "
        "(`with torch.no_grad(): param.copy_(distribute_tensor(values, param.device_mesh, param.placements))`), or "
        "load a state dict."
    )


def holds(slot: ParamSlot, param: Any) -> bool:
    """Whether ``param`` is the parameter of ``slot``, or what a module has in its place, whole or sharded."""
    return any(param is own for own in (slot.leaf, slot.registered, slot.placeholder) if own is not None)
