r"""Places tensors on lines so that no rank's cut falls inside a block, and the ranks' rows are as short as they can be.

A *block* is what must not be cut: a row, some rows, or a whole tensor. All ranks have rows of equal width ``S``::

    line      | a a a a a a . | a a a b b b . | b b b c d d . |      W = 3, S = 7
    blocks    a and b: 3 elements, c: 1, d: 2

The problem is as hard as bin packing: tensors of one block each are its items, rows its bins.

**Heuristic**: for a width ``S``, tensors are placed one after the other, those with the largest blocks first, each at
the first position, also in gaps that were left before, where all cuts fall between its blocks. A tensor that holds two
cuts needs an ``S`` that is a multiple of its block; therefore widths are tried from the bound upwards, in steps of the
least common multiple of the largest 1, 2, 3 ... sizes of blocks. The least width at which everything fits is kept.

**Bound**: no plan is shorter than the mean over ranks, nor than what the rank with most blocks of one tensor has. Nor
is a plan shorter than this one if its large tensors alone need as much, however they are shared out among lines: the
widths of their lines are multiples of their blocks. If each size of a block divides the next larger one, tensors leave
no gaps, and ``S`` is less than one largest block above the mean.

Tensors of a unit may lie on several lines, those with large blocks apart from those with small ones. Each line is one
more collective, so it must shorten the rows by `WORTH_A_LINE` of the unit, and by `LEAST_SAVED` elements of all ranks.

Source: veScale-FSDP (ByteDance, 2026), for the statement of the problem; the heuristic is ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from math import lcm

from fairshard.utils.span import Span, cut

WORTH_A_LINE = 0.02
LEAST_SAVED = 1 << 16
_MAX_LINES = 3
_MAX_STEPS = 24  # in one family of widths, before they grow faster
_GROWTH = 1.02
_MAX_WIDE = 8


@dataclass(frozen=True, order=True)
class Blocks:
    """A tensor of ``numel`` elements, of which ``block`` must stay together; its last block may be smaller."""

    block: int
    numel: int

    def bound(self, world_size: int) -> int:
        """Least number of elements on the rank that has most of them."""
        if not self.numel:
            return 0
        whole, last = divmod(self.numel, self.block)
        spread = cut(whole, world_size) * self.block
        return max(spread, (cut(whole + 1, world_size) - 1) * self.block + last) if last else spread


@dataclass(frozen=True)
class PlannedLine:
    """The tensors ``members``, in order of their position, at ``offsets`` of a line with rows of ``width`` elements."""

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    width: int


@dataclass(frozen=True)
class RaggedPlan:
    """Where the tensors of a unit lie, and the ``bound``, below which no plan's `width` can be."""

    lines: tuple[PlannedLine, ...]
    bound: int
    numel: int
    world_size: int

    @property
    def width(self) -> int:
        """Elements on each rank, on all lines together."""
        return sum(line.width for line in self.lines)

    @property
    def padding(self) -> float:
        """Padding as a fraction of the elements of the tensors."""
        return self.width * self.world_size / self.numel - 1 if self.numel else 0.0

    @property
    def least_padding(self) -> float:
        """The `padding` that a plan as short as the bound would have."""
        return self.bound * self.world_size / self.numel - 1 if self.numel else 0.0


@lru_cache(maxsize=256)
def plan_blocks(tensors: tuple[Blocks, ...], world_size: int) -> RaggedPlan:
    """Place ``tensors`` over ``world_size`` ranks; see the head of this file. Equal units are planned once."""
    numel = sum(tensor.numel for tensor in tensors)
    bound = max([cut(numel, world_size), *(tensor.bound(world_size) for tensor in tensors)])
    sizes = sorted({tensor.block for tensor in tensors}, reverse=True)
    least_saved = cut(max(LEAST_SAVED, int(WORTH_A_LINE * numel)), world_size)
    lines: dict[tuple[int, ...], PlannedLine] = {}
    best: list[PlannedLine] = []
    for parts in _partitions(sizes):
        if best and bound + (len(parts) - 1) * least_saved >= _cost(best, least_saved):
            continue
        for part in parts:
            if part not in lines:
                members = [index for index, tensor in enumerate(tensors) if tensor.block in part]
                lines[part] = plan_line(tensors, members, world_size)
        found = [lines[part] for part in parts]
        if not best or _cost(found, least_saved) < _cost(best, least_saved):
            best = found
    bound = max(bound, _bound_of_wide(tensors, sum(line.width for line in best), world_size))
    return RaggedPlan(tuple(best), bound, numel, world_size)


def plan_line(tensors: Sequence[Blocks], members: Sequence[int], world_size: int) -> PlannedLine:
    """Place the tensors ``members`` on one line."""
    order = sorted(members, key=lambda index: (-tensors[index].block, -tensors[index].numel, index))
    total = sum(tensors[index].numel for index in members)
    bound = max([cut(total, world_size), *(tensors[index].bound(world_size) for index in members)])
    best = PlannedLine(*_sorted(order, _placed([tensors[i] for i in order], total, world_size) or []), total)
    for step in _steps({tensors[index].block for index in members}, bound):
        for width in _widths(step, bound, best.width):
            offsets = _placed([tensors[index] for index in order], width, world_size)
            if offsets is not None:
                best = PlannedLine(*_sorted(order, offsets), width)
                break
    return best


def first_fit(start: int, tensor: Blocks, width: int) -> int | None:
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


def _placed(tensors: Sequence[Blocks], width: int, world_size: int) -> list[int] | None:
    """Positions of ``tensors``, placed in this order; None if they do not fit."""
    offsets, gaps, end = [], list[Span](), 0
    for tensor in tensors:
        for index, gap in enumerate(gaps):
            if gap.numel < tensor.numel:
                continue
            offset = first_fit(gap.start, tensor, width)
            if offset is not None and offset + tensor.numel <= gap.stop:
                left = Span(gap.start, offset), Span(offset + tensor.numel, gap.stop)
                gaps[index : index + 1] = [each for each in left if each.numel]
                break
        else:
            offset = first_fit(end, tensor, width) if tensor.numel else 0
            if offset is None or offset + tensor.numel > width * world_size:
                return None
            if offset > end:
                gaps.append(Span(end, offset))
            end = max(end, offset + tensor.numel)
        offsets.append(offset)
    return offsets


def _steps(blocks: set[int], bound: int) -> list[int]:
    """Steps between widths: the least common multiples of the largest sizes of blocks, unless above the bound."""
    steps, multiple = [1], 1
    for block in sorted(blocks, reverse=True):
        multiple = lcm(multiple, block)
        if multiple <= bound and multiple not in steps:
            steps.append(multiple)
    return steps[::-1]


def _widths(step: int, bound: int, stop: int) -> Iterator[int]:
    """Multiples of ``step`` from ``bound`` up to ``stop``, which is left out; after some, with growing distances."""
    number, tried = cut(bound, step), 0
    while number * step < stop:
        yield number * step
        tried += 1
        number += 1 if tried < _MAX_STEPS else 1 + int(number * (_GROWTH - 1))


def _partitions(sizes: Sequence[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """``sizes`` of blocks, largest first, as one line, two, and three."""
    for num_cuts in range(min(_MAX_LINES, len(sizes))):
        for cuts in combinations(range(1, len(sizes)), num_cuts):
            edges = [0, *cuts, len(sizes)]
            yield tuple(tuple(sizes[a:b]) for a, b in pairwise(edges))


def _bound_of_wide(tensors: Sequence[Blocks], width: int, world_size: int) -> int:
    """A bound on the width of plans shorter than ``width``, from tensors that hold two cuts in all of those.

    The least sum of the widths of lines that hold some of these tensors, each line's a multiple of their blocks.
    """
    wide = sorted((tensor for tensor in tensors if tensor.numel > 2 * width), reverse=True)[:_MAX_WIDE]
    best = width

    def share_out(index: int, lines: list[tuple[int, int]]) -> None:
        """Add the tensors from ``index`` on to ``lines`` of ``(elements, multiple)`` in every way."""
        nonlocal best
        least = sum(cut(numel, world_size * step) * step for numel, step in lines)
        if least >= best:
            return
        if index == len(wide):
            best = least
            return
        tensor = wide[index]
        for place, (numel, step) in enumerate(lines):
            joined = numel + tensor.numel, lcm(step, tensor.block)
            share_out(index + 1, [*lines[:place], joined, *lines[place + 1 :]])
        share_out(index + 1, [*lines, (tensor.numel, tensor.block)])

    share_out(0, [])
    return best


def _cost(lines: Sequence[PlannedLine], least_saved: int) -> int:
    return sum(line.width for line in lines) + (len(lines) - 1) * least_saved


def _sorted(members: Sequence[int], offsets: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Members and their offsets, by position."""
    pairs = sorted(zip(offsets, members, strict=True))
    return tuple(member for _, member in pairs), tuple(offset for offset, _ in pairs)
