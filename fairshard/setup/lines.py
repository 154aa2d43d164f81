"""Which parameters of a unit share a line: those whose cuts fall between blocks, and those that have owners."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fairshard.params.slot import ParamSlot
from fairshard.settings.check import FUNCTION_OF_PARAMETER, require
from fairshard.settings.placements import Owned, RowBlocks
from fairshard.utils.owners import balanced_owners
from fairshard.utils.placed_layout import OwnedLayout, RaggedLayout
from fairshard.utils.ragged_plan import Blocks, plan_blocks

PlacementFn = Callable[[nn.Parameter], Any]
"""Maps a parameter to its placement; None: the default."""


@dataclass(frozen=True)
class SlotLine:
    """The parameters ``slots``, by their positions in ``layout``; None: one after the other, cut anywhere."""

    slots: list[ParamSlot]
    layout: RaggedLayout | None


def lines_of(
    places: Mapping[ParamSlot, RowBlocks | Owned], world_size: int, loads: Callable[[], list[int]]
) -> list[SlotLine]:
    """Lines on ``world_size`` ranks for parameters and their placements: by blocks first, then that of owners.

    ``loads`` returns the bytes that each rank owns before; see `UnitGroups.loads`.
    """
    owned = [slot for slot, place in places.items() if isinstance(place, Owned) and world_size > 1]
    slots = [slot for slot in places if slot not in owned]
    sizes = tuple(Blocks(_block_of(slot, places[slot]), slot.numel) for slot in slots)
    lines = []
    for line in plan_blocks(sizes, world_size) if sizes else ():
        own = [slots[index] for index in line.members]
        layout = RaggedLayout([slot.numel for slot in own], line.offsets, line.width, world_size)
        lines.append(SlotLine(own, layout))
    if owned:
        ranks = [place.rank for place in places.values() if isinstance(place, Owned)]
        owners = balanced_owners([slot.leaf.nbytes for slot in owned], world_size, ranks, loads())
        lines.append(SlotLine(owned, OwnedLayout([slot.numel for slot in owned], owners, world_size)))
    return lines


def placed_lines(
    slots: Sequence[ParamSlot], placement: PlacementFn | None, world_size: int, loads: Callable[[], list[int]]
) -> list[SlotLine]:
    """A line of the parameters of ``slots`` that may be cut anywhere, if any, then those of the others.

    ``loads``: see `lines_of`.

    Raises:
        TypeError: ``placement`` returned something else than a `RowBlocks`, an `Owned` or None.
        ValueError: an owner is no rank.
    """
    every = {} if placement is None else {slot: _place_of(slot, placement, world_size) for slot in slots}
    places = {slot: place for slot, place in every.items() if place is not None}
    rest = [slot for slot in slots if slot not in places]
    return [*([SlotLine(rest, None)] if rest else []), *(lines_of(places, world_size, loads) if places else [])]


def check_placement(placement: PlacementFn | None, use_orig_params: bool) -> None:
    """Check the arguments of a wrapper.

    Raises:
        TypeError: ``placement`` is no function.
        ValueError: parameters that are placed by blocks would not be registered one by one.
    """
    FUNCTION_OF_PARAMETER("placement_fn", placement)
    require(
        placement is None or use_orig_params,
        "`use_orig_params` must be True with `placement_fn`, because one flat parameter has no blocks, but is False. "
        "Pass True.",
    )


def check_owner(place: Owned, fqn: str, world_size: int) -> None:
    """Raise if ``place``, that of parameter ``fqn``, names no rank.

    Raises:
        ValueError: it is not below ``world_size``.
    """
    require(
        place.rank is None or place.rank < world_size,
        f"`Owned(rank)` must be one of the {world_size} ranks that shard a parameter, from 0 to {world_size - 1}, but "
        f"is {place.rank} for `{fqn}`. Leave it out to let the planner choose an owner.",
    )


def _place_of(slot: ParamSlot, placement: PlacementFn, world_size: int) -> RowBlocks | Owned | None:
    """The answer of ``placement`` for ``slot``; None, without asking it, for a parameter without dimensions."""
    found = placement(slot.leaf) if slot.shape else None
    if isinstance(found, Owned):
        check_owner(found, slot.fqn, world_size)
    require(
        found is None or isinstance(found, (RowBlocks, Owned)),
        f"`placement_fn` must return a RowBlocks, an Owned or None, but returned {found!r} for `{slot.fqn}`. Return "
        "None for the default placement.",
        TypeError,
    )
    return found


def _block_of(slot: ParamSlot, place: RowBlocks | Owned) -> int:
    """Number of elements of ``slot`` that must stay together."""
    return max(1, slot.numel) if isinstance(place, Owned) else place.block_of(slot.shape)
