r"""Places tensors on lines so that no rank's cut falls inside a block, and the ranks' rows are short.

A *block* is what must not be cut: a row, some rows, or a whole tensor. All ranks have rows of equal width ``S``::

    line      | a a a a a a . | a a a b b b . | b b b c d d . |      W = 3, S = 7
    blocks    a and b: 3 elements, c: 1, d: 2

The problem is as hard as bin packing: tensors of one block each are its items, rows its bins.

**Heuristic**: for a width ``S``, tensors are placed one after the other, those with the largest blocks first, each at
the next position where all cuts fall between its blocks. A tensor that holds two cuts needs an ``S`` that is a multiple
of its block; therefore widths are tried upwards from the mean, or from what one tensor needs, in steps of the least
common multiple of the largest 1, 2, 3 ... sizes of blocks. The least width at which everything fits is kept. If each
size of a block divides the next larger one, tensors leave no gaps, and ``S`` is less than one largest block above the
mean.

Tensors of a unit may lie on several lines, those with large blocks apart from those with small ones. Each line is one
more collective, so it must shorten the rows by `WORTH_A_LINE` of the unit, and by `LEAST_SAVED` elements of all ranks.

Source: veScale-FSDP (ByteDance, 2026), for the statement of the problem; the heuristic is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from math import lcm

from fairshard.utils.span import cut

WORTH_A_LINE = 0.02
LEAST_SAVED = 1 << 16
_MAX_LINES = 3
_MAX_STEPS = 24  # in one family of widths, before they grow faster
_GROWTH = 0.02


@dataclass(frozen=True)
class Blocks:
    """A tensor of ``numel`` elements, of which ``block`` must stay together; its last block may be smaller."""

    block: int
    numel: int

    def least(self, world_size: int) -> int:
        """A number of elements that some rank has at least."""
        return cut(max(1, self.numel // self.block), world_size) * min(self.block, self.numel)


@dataclass(frozen=True)
class PlannedLine:
    """The tensors ``members``, in order of their position, at ``offsets`` of a line with rows of ``width`` elements."""

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    width: int


@lru_cache(maxsize=256)
def plan_blocks(tensors: tuple[Blocks, ...], world_size: int) -> tuple[PlannedLine, ...]:
    """Place ``tensors`` over ``world_size`` ranks; see the head of this file. Equal units are planned once."""
    sizes = sorted({tensor.block for tensor in tensors}, reverse=True)
    numel = sum(tensor.numel for tensor in tensors)
    worth = cut(max(LEAST_SAVED, int(WORTH_A_LINE * numel)), world_size)
    best: tuple[PlannedLine, ...] = (plan_line(tensors, range(len(tensors)), world_size),)
    for num_cuts in range(1, min(_MAX_LINES, len(sizes))):
        if _cost(best, worth) <= cut(numel, world_size) + (num_cuts + 1) * worth:
            break  # not even lines without padding would be better
        for cuts in combinations(range(1, len(sizes)), num_cuts):
            parts = [sizes[start:stop] for start, stop in pairwise([0, *cuts, len(sizes)])]
            members = [[index for index, tensor in enumerate(tensors) if tensor.block in part] for part in parts]
            lines = tuple(plan_line(tensors, each, world_size) for each in members)
            best = min(best, lines, key=lambda lines: _cost(lines, worth))
    return best


def plan_line(tensors: Sequence[Blocks], members: Sequence[int], world_size: int) -> PlannedLine:
    """Place the tensors ``members`` on one line."""
    order = tuple(sorted(members, key=lambda index: (-tensors[index].block, -tensors[index].numel, index)))
    own = [tensors[index] for index in order]
    total, step = sum(tensor.numel for tensor in own), 1
    least = max([cut(total, world_size), *(tensor.least(world_size) for tensor in own)])
    best = PlannedLine(order, _placed(own, total, world_size) or (), total)
    for block in sorted({1, *(tensor.block for tensor in own)}, key=lambda block: (block > 1, -block)):
        step = lcm(step, block)
        width, num_tried = cut(least, step) * step, 0
        while width < best.width and step <= least:
            offsets = _placed(own, width, world_size)
            if offsets is not None:
                best = PlannedLine(order, offsets, width)
            num_tried += 1
            width += step * (1 if num_tried < _MAX_STEPS else 1 + int(width // step * _GROWTH))
    return best


def next_fit(start: int, tensor: Blocks, width: int) -> int | None:
    """The first position from ``start`` on at which all cuts of rows of ``width`` fall between blocks of ``tensor``."""
    for _ in range(2):
        room = width - start % width  # up to the next cut
        if tensor.numel <= room:
            return start
        head = room - room % tensor.block
        if head and (width % tensor.block == 0 or tensor.numel - head <= width):
            return start + room - head
        start += room
    return None


def _placed(tensors: Sequence[Blocks], width: int, world_size: int) -> tuple[int, ...] | None:
    """Positions of ``tensors``, one after the other; None if they do not fit."""
    offsets, end = list[int](), 0
    for tensor in tensors:
        offset = next_fit(end, tensor, width) if tensor.numel else end
        if offset is None or offset + tensor.numel > width * world_size:
            return None
        offsets.append(offset)
        end = offset + tensor.numel
    return tuple(offsets)


def _cost(lines: Sequence[PlannedLine], worth: int) -> int:
    return sum(line.width + worth for line in lines)
