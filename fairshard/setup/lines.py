"""Which parameters of a unit share a line whose cuts fall between blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fairshard.params.slot import ParamSlot
from fairshard.settings.placements import RowBlocks
from fairshard.utils.ragged_layout import RaggedLayout
from fairshard.utils.ragged_plan import Blocks, RaggedPlan, plan_blocks

PlacementFn = Callable[[nn.Parameter], Any]
"""Maps a parameter to its placement; None: the default."""


@dataclass(frozen=True)
class SlotLine:
    """The parameters ``slots``, in the order of their positions in ``layout``."""

    slots: list[ParamSlot]
    layout: RaggedLayout


@dataclass(frozen=True)
class SlotLines:
    """The ``lines`` of some parameters, and the ``plan`` that they follow."""

    lines: list[SlotLine]
    plan: RaggedPlan

    @staticmethod
    def of(slots: Sequence[ParamSlot], blocks: Sequence[int], world_size: int) -> SlotLines:
        """Lines for ``slots``, of which ``blocks`` elements each must stay together, on ``world_size`` ranks."""
        sizes = tuple(Blocks(block, slot.numel) for slot, block in zip(slots, blocks, strict=True))
        plan = plan_blocks(sizes, world_size)
        lines = []
        for line in plan.lines:
            own = [slots[index] for index in line.members]
            layout = RaggedLayout([slot.numel for slot in own], line.offsets, line.width, world_size)
            lines.append(SlotLine(own, layout))
        return SlotLines(lines, plan)


def block_of(slot: ParamSlot, placement: PlacementFn) -> int | None:
    """Number of elements of ``slot`` that must stay together; None if ``placement`` leaves it where it is by default.

    Raises:
        TypeError: ``placement`` returned something else than a `RowBlocks` or None.
    """
    found = placement(slot.leaf)
    if found is None:
        return None
    if not isinstance(found, RowBlocks):
        raise TypeError(
            f"`placement_fn` must return a RowBlocks or None, but returned {found!r} for `{slot.fqn}`. Return None for "
            "the default placement."
        )
    return found.block_of(slot.shape) if slot.shape else None
