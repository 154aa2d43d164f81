"""Finds writes to whole parameters, which are lost when these are freed."""

from __future__ import annotations

import warnings
from operator import attrgetter
from typing import Any

from torch import Tensor

from fairshard.engine.observer import Observer
from fairshard.engine.root import Root
from fairshard.engine.unit import Unit
from fairshard.errors import ShardChangedError
from fairshard.params.extended_slot import ExtendedSlot
from fairshard.params.slot import ParamSlot
from fairshard.utils.user_line import level_of_user

# Of slots; `map` with them takes less host time than a loop.
_VERSION, _LEAF = attrgetter("leaf._version"), attrgetter("leaf")


class LeafWrites(Observer):
    """Compares the version counters of the leaves of ``units``, and the addresses of what they show.

    Raises after a forward that has written. Between passes, when the user has gathered a unit, it warns instead.
    """

    def __init__(self, units: list[Unit]) -> None:
        self._slots = {unit: [slot for flat_param in unit.flat_params for slot in flat_param.slots] for unit in units}
        self._plain = {unit for unit, slots in self._slots.items() if all(type(slot) is ParamSlot for slot in slots)}
        self._noted: dict[Unit, list[int]] = {}
        self._assigned: dict[Unit, list[int]] = {}  # addresses of which the user has been warned

    @staticmethod
    def of(root: Root) -> LeafWrites:
        """The check of ``root``."""
        return next(observer for observer in root.observers if isinstance(observer, LeafWrites))

    def call_enters(self, unit: Unit) -> None:
        """Leaves that are not registered yet have no writes of the user's."""
        if unit.is_pinned and not unit.open_calls:
            self.warn(unit)
        elif not unit.registered.are_leaves:
            self.note(unit)

    def call_leaves(self, unit: Unit, completed: bool, is_last: bool) -> None:
        """Raise if the forward has written to a leaf.

        Does not check leaves that are no longer registered: a backward inside the forward has freed them.

        Raises:
            ShardChangedError: names the first such parameter.
        """
        if completed and (fqn := self.written(unit)) is not None:
            raise ShardChangedError(
                f"Parameter `{fqn}` must not be written to inside the forward of its unit, but was (also "
                "`nn.Embedding(max_norm=...)` does that): the change is lost when the gathered parameters are freed. "
                "Compute with a changed value instead (`torch.nn.utils.parametrize`), or write between steps: inside "
                "`summon_full_params`, or to the DTensor of `fully_shard`."
            )

    def note(self, unit: Unit) -> None:
        """Look for writes to the leaves of ``unit`` from now on."""
        self._noted[unit] = list(map(_VERSION, self._slots[unit]))
        self._assigned.pop(unit, None)

    def written(self, unit: Unit) -> str | None:
        """The name of a leaf that was written to in place since `note`, or whose ``.data`` was assigned, if any."""
        slots, noted = self._slots[unit], self._noted.get(unit)
        if not unit.registered.are_leaves or noted is None:
            return None
        views = [view for flat_param in unit.flat_params for view in flat_param.gathered.views]
        versions, leaves, shown = list(map(_VERSION, slots)), self._addresses(unit), list(map(Tensor.data_ptr, views))
        if versions == noted and (leaves == shown or leaves == self._assigned.get(unit)):
            return None
        pairs = zip([*zip(versions, leaves, strict=True)], [*zip(noted, shown, strict=True)], strict=True)
        return next(slot.fqn for slot, (now, before) in zip(slots, pairs, strict=True) if now != before)

    def _addresses(self, unit: Unit) -> list[int]:
        """Where the leaves lie; a tensor subclass has its own memory: of such a leaf, where its values do."""
        slots = self._slots[unit]
        if unit in self._plain:
            return list(map(Tensor.data_ptr, map(_LEAF, slots)))
        views = [view for flat_param in unit.flat_params for view in flat_param.gathered.views]
        pairs = zip(slots, views, strict=True)
        return [(view if isinstance(slot, ExtendedSlot) else slot.values).data_ptr() for slot, view in pairs]

    def warn(self, unit: Unit) -> None:
        """Warn of writes to parameters that the user has gathered and that the shards do not hold, then forget them."""
        are_copies = any(not flat_param.computes_on_shard for flat_param in unit.flat_params)
        if are_copies and (fqn := self.written(unit)) is not None:
            warnings.warn(
                f"Whole parameters must not be written to while their unit stays gathered, but `{fqn}` was: the change "
                "is lost when they are freed. Write inside `summon_full_params`, or to the shards that `parameters()` "
                "yields after the backward, or, with `fully_shard`, after `reshard()`.",
                stacklevel=level_of_user(),
            )
        self.note(unit)
        self._assigned[unit] = self._addresses(unit)


def show(unit: Unit) -> None:
    """Show the user the whole parameters of ``unit``: see `Unit.show`."""
    unit.show()
    LeafWrites.of(unit.root).note(unit)


def unpin(unit: Any) -> None:
    """Free what the user has gathered of ``unit``; warns if the user has written to it."""
    if unit.is_pinned and not unit.open_calls:
        LeafWrites.of(unit.root).warn(unit)
    unit.unpin()
