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
    """The parameters ``slots``, by their positions in ``layout``; None: one after the other, cut anywhere."""

    slots: list[ParamSlot]
    layout: RaggedLayout | None


@dataclass(frozen=True)
class SlotLines:
    """The ``lines`` of some parameters, and the ``plan`` of those placed by blocks; None: there are none."""

    lines: list[SlotLine]
    plan: RaggedPlan | None

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

    @staticmethod
    def placed(slots: Sequence[ParamSlot], placement: PlacementFn | None, world_size: int) -> SlotLines:
        """A line of the parameters of ``slots`` that may be cut anywhere, if any, then those of the others.

        Raises:
            TypeError: ``placement`` returned something else than a `RowBlocks` or None.
        """
        blocks = {} if placement is None else {slot: _block_of(slot, placement) for slot in slots}
        blocks = {slot: block for slot, block in blocks.items() if block}
        rest = [slot for slot in slots if slot not in blocks]
        found = SlotLines.of(list(blocks), list(blocks.values()), world_size) if blocks else SlotLines([], None)
        return SlotLines([SlotLine(rest, None), *found.lines] if rest else found.lines, found.plan)


def check_placement(placement: PlacementFn | None, use_orig_params: bool) -> None:
    """Check the arguments of a wrapper.

    Raises:
        TypeError: ``placement`` is no function.
        ValueError: parameters that are placed by blocks would not be registered one by one.
    """
    if placement is not None and not callable(placement):
        raise TypeError(f"`placement_fn` must be a function of a parameter, but is {placement!r}.")
    if placement is not None and not use_orig_params:
        raise ValueError(
            "`use_orig_params` must be True with `placement_fn`, because one flat parameter has no blocks, but is "
            "False. Pass True."
        )


def _block_of(slot: ParamSlot, placement: PlacementFn) -> int:
    """Number of elements of ``slot`` that must stay together; 0 if ``placement`` leaves it where it is by default."""
    found = placement(slot.leaf)
    if found is None:
        return 0
    if not isinstance(found, RowBlocks):
        raise TypeError(
            f"`placement_fn` must return a RowBlocks or None, but returned {found!r} for `{slot.fqn}`. Return None for "
            "the default placement."
        )
    return found.block_of(slot.shape) if slot.shape else 0
