"""Which parameters are shards, and which are originals that became leaves of a unit."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fairshard.engine.unit import Unit
from fairshard.params.extended_slot import ExtendedSlot
from fairshard.params.flat_param import FlatParam
from fairshard.params.rule import GradHome

originals: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Weak references to the slots of original parameters; a slot refers to its leaf and would keep it alive."""
# By `id`: `module.to` converts DTensors in place only if they have no weak references.
_shards: dict[int, tuple[weakref.ref[Any], GradHome]] = {}
_copies: weakref.WeakSet[Unit] = weakref.WeakSet()  # units made by deepcopy or unpickling that are not added yet
_num_added = 0


def add_shards(flat_params: Sequence[FlatParam], home: GradHome) -> None:
    """Know the shards and original parameters of ``flat_params``, whose gradients are kept at ``home``."""
    global _num_added
    for flat_param in flat_params:
        for slot in flat_param.slots:
            original = slot.original() if isinstance(slot, ExtendedSlot) and slot.original is not None else None
            originals[slot.leaf if original is None else original] = weakref.ref(slot)
            _num_added += 1
        for stepped in flat_param.stepped:
            _add(stepped, home)


def _add(stepped: Any, home: GradHome) -> None:
    key = id(stepped.shard)

    def forget(reference: weakref.ref[Any]) -> None:
        if key in _shards and _shards[key][0] is reference:
            del _shards[key]

    _shards[key] = weakref.ref(stepped, forget), home


def add_copy(unit: Unit) -> None:
    """Know the shards of ``unit``, a copy that is not complete yet, from the next `add_copies` on."""
    _copies.add(unit)


def add_copies() -> None:
    """Know the shards of all copies."""
    for unit in list(_copies):
        _copies.discard(unit)
        add_shards(unit.flat_params, unit.config.rule.grad_home)


def num_added() -> int:
    """Number of original parameters added so far."""
    return _num_added


def shard_of(param: Tensor) -> tuple[Any, GradHome]:
    """The flat param or `OrigParam` whose shard is ``param``, or None; and where its gradient is kept."""
    reference, home = _shards.get(id(param), (None, GradHome.SHARD))
    stepped = reference() if reference is not None else None
    return (stepped if stepped is not None and stepped.shard is param else None), home


def stepped_of(param: Any) -> Any:
    """The flat param or `OrigParam` whose shard is ``param``; None if ``param`` is not a shard."""
    add_copies()
    return shard_of(param)[0]
