"""Parameters that are each cut by rows, as DTensors are; converts whole values to rows and back.

A row of the buffer ``[W, S]`` holds the rows of all parameters on one rank, side by side. Whole parameters are copied
out of it into separate memory, in one copy. A unit of one parameter needs no copy: its rows are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fairshard.params.flat_param import FlatParam
from fairshard.params.gathered import Gather, Gathered
from fairshard.params.line import FlatLine
from fairshard.utils.collectives import Communicator, RowGather
from fairshard.utils.part_gather import PartGather
from fairshard.utils.rows_layout import RowsLayout
from fairshard.utils.span import Span
from fairshard.utils.storage import free_storage_
from fairshard.views.copied_out import Beside, CopiedOut, aligned_params, is_to_align
from fairshard.views.cut import Cut
from fairshard.views.extended_gathered import ExtendedGathered
from fairshard.views.joint_gather import DeferredGather, JointGather
from fairshard.views.received_in_place import ReceivedInPlace, large_params


class Rows(FlatLine):
    """Parameters that are cut by ``cuts``; this rank owns part ``rank`` of each."""

    layout: RowsLayout

    def __init__(self, cuts: Sequence[Cut], rank: int, world_size: int) -> None:
        layout = RowsLayout([each.size for each in cuts], world_size)
        super().__init__([each.shape for each in cuts], rank, layout)
        self.cuts = list(cuts)

    def of(self, indexes: Sequence[int]) -> Rows:
        """A layout of the parameters ``indexes`` only."""
        return Rows([self.cuts[index] for index in indexes], self.rank, self.layout.world_size)

    def flattened(self, index: int, value: Tensor) -> Tensor:
        """The elements of ``value``, the whole parameter ``index``, ordered by rank."""
        each = self.cuts[index]
        return (each.parts(value) if each.dim else value).reshape(-1)

    def shaped(self, index: int, flat: Tensor) -> Tensor:
        """The whole parameter ``index``, from its elements ``flat`` in the order of `flattened`."""
        each = self.cuts[index]
        if not each.dim or not flat.numel():
            return flat.view(each.shape)
        parts = each.stacked(flat.view(each.world_size, -1))
        return parts.movedim(0, each.dim).flatten(each.dim, each.dim + 1)

    def own_shape(self, index: int) -> tuple[int, ...]:
        """The shape of this rank's part of parameter ``index``."""
        return self.cuts[index].shape_of(self.layout.num_rows(index, self.rank))

    # ---- gathered

    def gathered_in(self, buffer: Tensor, comm: Communicator) -> Gathered:
        """Memory of the whole parameters: ``buffer`` ``[W, S]`` itself, or a line to which they are copied from it."""
        gather = RowGather(comm, buffer)
        lie_apart = self.layout.world_size > 1 and (len(self.cuts) > 1 or self.cuts[0].dim != 0)
        if lie_apart:
            large = large_params(self.layout, buffer.itemsize) if comm.exchange is not None and buffer.is_cpu else []
            if large and all(not each.dim for each in self.cuts):
                return self._received_in_place(large, gather, buffer)
        if lie_apart or is_to_align(self.shapes, self.layout.columns, buffer.dtype, buffer.device):
            return CopiedOut(gather, buffer, buffer[comm.rank], self.beside(buffer))
        return self.in_place(buffer, comm)

    def in_place(self, buffer: Tensor, comm: Communicator) -> Gathered:
        """See `FlatLine.in_place`; for one rank, or one parameter that is cut on its first dimension."""
        spans = [Span(start, start + n) for start, n in zip(self.layout.columns, self.layout.numels, strict=True)]
        flat = buffer.view(-1)
        views = [flat[span.start : span.stop].view(each.shape) for each, span in zip(self.cuts, spans, strict=True)]
        return Gathered(RowGather(comm, buffer), buffer, buffer[comm.rank], views)

    def params_of(self, line: Tensor) -> list[Tensor]:
        """The parameters, shaped, copied out of a gathered buffer of ``W * S`` elements."""
        beside = self.beside(line.view(self.layout.world_size, -1))
        if beside.targets:  # parameters may have no elements
            torch._foreach_copy_(beside.targets, beside.sources)
        return beside.params

    def beside(self, buffer: Tensor) -> Beside:
        """New memory for the whole parameters, aligned, and the copies that fill it from ``buffer``."""
        return self._copies(buffer, *aligned_params(self.shapes, buffer, self.layout.world_size))

    def _copies(self, buffer: Tensor, line: Tensor, params: list[Tensor]) -> Beside:
        """The copies from ``buffer`` that fill ``params``, views of ``line``."""
        sources, targets = [], []
        for each, param, blocks in zip(self.cuts, params, self.layout.blocks, strict=True):
            for block in blocks:
                if each.dim is None:
                    block = replace(block, rows=Span(0, 1))
                sources.append(each.stacked(block.of(buffer)) if each.dim else block.of(buffer))
                targets.append(each.parts(param) if each.dim else block.like(param.view(-1)))
        return Beside(line, params, sources, targets)

    def _received_in_place(self, large: Sequence[int], gather: RowGather, buffer: Tensor) -> ReceivedInPlace:
        """Memory of the whole parameters, in which those of ``large`` are received where they compute."""
        comm, layout, beside = gather.comm, self.layout, self.beside(buffer)
        small = [index for index in range(len(self.cuts)) if index not in large]
        rows = self.of(small)
        staging = buffer.new_empty(layout.world_size, rows.shard_numel)
        parts = {index: self._parts_of(index, beside.params[index].view(-1)) for index in large}
        places = {index: each[comm.rank] for index, each in parts.items()}
        places.update(zip(small, staging[comm.rank].split(rows.layout.widths), strict=True))
        starts = [layout.columns[index] for index in places]
        return ReceivedInPlace(
            gather,
            buffer,
            beside,
            PartGather(comm, staging, list(parts.values())),
            rows._copies(staging, beside.line, [beside.params[index] for index in small]),
            [(start, place) for start, place in zip(starts, places.values(), strict=True) if place.numel()],
        )

    def _parts_of(self, index: int, flat: Tensor) -> list[Tensor]:
        """The rows of each rank in ``flat``, the whole parameter ``index``, which is cut on its first dimension."""
        width = self.cuts[index].size[1]
        return list(flat.split([self.layout.num_rows(index, rank) * width for rank in range(self.layout.world_size)]))

    # ---- gradients

    def bucket_views(self, columns: Tensor) -> list[list[Tensor]]:
        """For each parameter, the blocks of ``columns`` ``[W, S]`` with its gradient; the last entry: unused blocks."""
        views = []
        for index, each in enumerate(self.cuts):
            blocks = [block.of(columns) for block in self.layout.blocks[index]]
            if each.dim == 0 and len(blocks) == 1 and len(blocks[0]) == each.shape[0]:
                blocks = [blocks[0].view(each.shape)]  # one row of it on each rank
            views.append([each.stacked(block) for block in blocks] if each.dim else blocks)
        return [*views, [block.of(columns) for block in self.layout.empty_blocks]]

    def cut_as(self, runs: list[Tensor], index: int, value: Tensor) -> Sequence[Tensor]:
        """``value``, the whole parameter ``index``, cut like ``runs``, its `bucket_views`."""
        if self.cuts[index].dim:
            return [self.cuts[index].parts(value) for _ in runs]
        if len(runs) == 1 and runs[0].numel() == value.numel():
            return [value.reshape_as(runs[0])]  # faster than with a torch.Size
        flat = value.reshape(-1)
        return [block.like(flat) for block in self.layout.blocks[index]]

    @staticmethod
    def join_gathers(flat_params: Sequence[FlatParam]) -> None:
        """Make all ``flat_params`` of one unit share one gather, except those without elements."""
        joined = [(each, each.line) for each in flat_params if isinstance(each.line, Rows) and each.line.shard_numel]
        if len(joined) < 2 or joined[0][1].layout.world_size == 1:
            return
        joint = JointGather([own if isinstance(own := each.gathered, ExtendedGathered) else each for each, _ in joined])
        deferred, last = DeferredGather(joint), len(joined) - 1
        together: list[CopiedOut] = []
        for index, ((each, rows), columns) in enumerate(zip(joined, joint.columns, strict=True)):
            each.gather_into(_copied_out(each, rows, joint if index == last else deferred, columns, together))
        free_storage_(joint.buffer)  # last: freed memory cannot be viewed


def is_ordered(line: FlatLine, index: int) -> bool:
    """Whether the elements of parameter ``index`` are cut in the order of their memory."""
    return not (isinstance(line, Rows) and line.cuts[index].dim)


def _copied_out(
    flat_param: FlatParam, rows: Rows, gather: Gather, columns: Tensor, together: list[CopiedOut]
) -> CopiedOut:
    """Memory of the whole parameters of ``flat_param``, copied out of ``columns`` of a buffer that ``gather`` fills."""
    own = flat_param.gathered
    if isinstance(own, ExtendedGathered):
        return own.joined(gather, columns, together)
    return CopiedOut(gather, columns, columns[rows.rank], rows.beside(columns), together)
