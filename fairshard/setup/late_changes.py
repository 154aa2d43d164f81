"""Changes to a model after wrapping: each is adopted, or refused with an error that names the parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fairshard.engine.unit import Unit
from fairshard.errors import FairshardError
from fairshard.params.flat_param import FlatParam
from fairshard.setup.added_parameters import check_all_known


def adopt_changes(unit: Unit) -> None:
    """Adopt moves and casts of a unit that registers DTensors; split flat params that now differ in dtype or device."""
    flat_params: list[FlatParam] = []
    for flat_param in unit.flat_params:
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, param in enumerate(flat_param.shows.registered):
            kinds.setdefault((param.dtype, param.device), []).append(index)
        if len(kinds) > 1:
            if any(param.is_meta for param in flat_param.shows.registered):
                flat_params.append(flat_param)  # some parameters have no memory yet
            else:
                flat_params += [_part(flat_param, indexes) for indexes in kinds.values()]
        else:
            flat_param.adopt_assigned()
            flat_params.append(flat_param)
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
    for unit in units:
        if unit.members is not None:
            adopt_changes(unit)
    _check_memory(units)
    check_all_known(module)
    for unit in units:
        if unit.members is not None:
            _renew_references(unit)


def connect(unit: Unit) -> None:
    """Connect unpickled DTensors of ``unit`` to its process groups."""
    groups = [group.resolve() for group in (unit.groups.replicas, unit.groups.shard) if group is not None]
    for flat_param in unit.flat_params if unit.members is not None else ():
        shown: Any = flat_param.shows  # DTensors
        shown.connect(*groups[-shown.mesh.ndim :])


def _check_memory(units: Sequence[Unit]) -> None:
    left = [
        slot.fqn
        for unit in units
        if unit.members is not None
        for flat_param in unit.flat_params
        for slot, param in zip(flat_param.slots, flat_param.shows.registered, strict=True)
        if param.is_meta
    ]
    if left:
        raise FairshardError(
            f"Parameters must have memory and values before the first forward, but {_listed(left)} still on the meta "
            "device. Call `model.to_empty(device=...)`, then initialise them, or load a state dict."
        )


def _renew_references(unit: Unit) -> None:
    """Put the leaves into the weight lists of RNNs, which rebuild their list whenever they are moved."""
    for flat_param in unit.flat_params:
        for slot in flat_param.slots:
            for owner, name in slot.owners:
                if isinstance(owner, nn.RNNBase) and name in owner._flat_weights_names:
                    owner._flat_weights[owner._flat_weights_names.index(name)] = slot.leaf


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more are" if len(names) > 3 else " are" if len(names) > 1 else " is"
    return ", ".join(f"`{name}`" for name in names[:3]) + more
