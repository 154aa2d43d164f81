"""Changes to a model after it was sharded: each is adopted, or refused with an error that names the parameter.

Parameters that appear later are refused. When a pass begins, the modules and the parameters that the model has are
compared with those of the last check, in some 50 ns each. If they are others, every parameter is looked at.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fairshard.checks.shards import stepped_of
from fairshard.engine.tree import is_wrapper, paths_of, unit_of, walk
from fairshard.engine.unit import Unit
from fairshard.errors import FairshardError
from fairshard.params.flat_param import FlatParam
from fairshard.params.slot import ParamSlot, slot_of
from fairshard.utils.failures import reported
from fairshard.utils.names import join


def adopt_changes(unit: Unit) -> None:
    """Adopt moves and casts of a unit that registers DTensors; split flat params that now differ in dtype or device."""
    flat_params: list[FlatParam] = []
    for flat_param in unit.flat_params:
        registered = flat_param.shows.registered
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, param in enumerate(registered):
            kinds.setdefault((param.dtype, param.device), []).append(index)
        if len(kinds) <= 1:
            flat_param.adopt_assigned()
        splits = len(kinds) > 1 and not any(param.is_meta for param in registered)  # all have memory
        flat_params += [_part(flat_param, indexes) for indexes in kinds.values()] if splits else [flat_param]
    unit.flat_params = flat_params


def _part(flat_param: FlatParam, indexes: Sequence[int]) -> FlatParam:
    """The parameters ``indexes`` of ``flat_param``, now of one dtype and device, as a separate flat param.

    The registered parameters and the objects in `stepped` stay the same. Split off all other parameters too.
    """
    shows: Any = flat_param.shows
    part = FlatParam(shows.split(indexes), flat_param.slots[indexes[0]].fqn, replace(flat_param.route))
    part.trained = bytes(flat_param.trained[index] for index in indexes)
    for index, stepped in enumerate(part.stepped):
        stepped.move_to(part, index)
    part.adopt_assigned()
    part.shows.link()
    return part


def adopt_all_changes(module: nn.Module, units: Sequence[Unit]) -> None:
    """Adopt all changes of ``units``, which are in ``module``; no communication.

    Raises:
        FairshardError: parameters are still on the meta device, or were added or replaced.
    """
    in_place = [unit for unit in units if unit.members is not None]
    for unit in in_place:
        adopt_changes(unit)
    flat_params = [flat_param for unit in in_place for flat_param in unit.flat_params]
    pairs = [pair for each in flat_params for pair in zip(each.slots, each.shows.registered, strict=True)]
    left = [slot.fqn for slot, param in pairs if param.is_meta]
    if left:
        raise FairshardError(
            "Parameters must have memory and values before the first forward, but "
            f"{', '.join(f'`{fqn}`' for fqn in left[:3])} and {max(0, len(left) - 3)} more are still on the meta "
            "device. Call `model.to_empty(device=...)`, then initialise them, or load a state dict with `assign=True`."
        )
    check_all_known(module)
    for slot, _ in pairs:  # RNNs rebuild their lists of weights whenever they are moved
        for owner, name in slot.owners:
            if isinstance(owner, nn.RNNBase) and name in owner._flat_weights_names:
                owner._flat_weights[owner._flat_weights_names.index(name)] = slot.leaf


def connect(unit: Unit) -> None:
    """Connect unpickled DTensors of ``unit`` to its process groups."""
    groups = [group.resolve() for group in (unit.groups.replicas, unit.groups.shard) if group is not None]
    for flat_param in unit.flat_params if unit.members is not None else ():
        shown: Any = flat_param.shows  # DTensors
        shown.connect(*groups[-shown.mesh.ndim :])


# ---- parameters that are added or replaced


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
            other = stepped_of(param)
            if slot is not None:
                any_replaced = True
                _check_replacement(slot, param, fqn, other)
                _refuse_if_trained(part, name, param, slot, fqn)
            elif other is None and slot_of(param) is None:
                raise FairshardError(_refusal_of_new(fqn, is_wrapper(holder)))
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


def _check_replacement(slot: ParamSlot, param: nn.Parameter, fqn: str, other: Any) -> None:
    """Raise if ``param``, which replaces that of ``slot``, is registered for ``other`` shards, or is a DTensor."""
    registered = slot.registered
    if other is not None and registered is not None:
        raise FairshardError(
            f"Weights must be tied before they are sharded, but sharded parameter `{other.name}` was assigned to "
            f"`{fqn}`: each has its own shards, and would be trained by itself. Tie them before sharding; to copy the "
            "values, call `copy_` under `torch.no_grad()`."
        )
    if isinstance(param, DTensor) and isinstance(registered, DTensor) and param.device_mesh == registered.device_mesh:
        raise FairshardError(_refusal_of_new(fqn, in_wrapper=False))


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
    hooks: Any = param._post_accumulate_grad_hooks or {}
    if param.requires_grad and param.is_leaf and not any(isinstance(hook, _Refusal) for hook in hooks.values()):
        is_dtensor = isinstance(slot.registered, DTensor)
        text = _refusal_of_whole(fqn) if is_dtensor else _refusal_of_new(fqn, in_wrapper=True)
        param.register_post_accumulate_grad_hook(_Refusal(module, name, text))


def _refusal_of_new(fqn: str, in_wrapper: bool) -> str:
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
