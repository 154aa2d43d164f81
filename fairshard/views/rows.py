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
from fairshard.utils.rows_layout import RowsLayout
from fairshard.utils.span import Span, cut
from fairshard.utils.storage import free_storage_
from fairshard.views.copied_out import Beside, CopiedOut
from fairshard.views.cut import Cut
from fairshard.views.extended_gathered import ExtendedGathered
from fairshard.views.joint_gather import DeferredGather, JointGather


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

    def lay_out(self, values: list[Tensor]) -> Tensor:
        """Whole parameters as a buffer ``[W, S]`` in new memory, padded with zeros."""
        buffer = values[0].new_zeros(self.layout.world_size, self.shard_numel)
        for index, value in enumerate(values):
            for block in self.layout.blocks[index]:
                block.of(buffer).copy_(block.like(self.flattened(index, value)))
        return buffer

    # ---- gathered

    def gathered_in(self, buffer: Tensor, comm: Communicator) -> Gathered:
        """Memory of the whole parameters: ``buffer`` ``[W, S]`` itself, or a line to which they are copied from it."""
        gather = RowGather(comm, buffer)
        if self.layout.world_size > 1 and (len(self.cuts) > 1 or self.cuts[0].dim != 0):
            return CopiedOut(gather, buffer, comm.rank, self.beside(buffer))
        spans = [Span(start, start + n) for start, n in zip(self.layout.columns, self.layout.numels, strict=True)]
        flat = buffer.view(-1)
        views = [flat[span.start : span.stop].view(each.shape) for each, span in zip(self.cuts, spans, strict=True)]
        return Gathered(gather, buffer, comm.rank, views)

    def params_of(self, line: Tensor) -> list[Tensor]:
        """The parameters, shaped, copied out of a gathered buffer of ``W * S`` elements."""
        beside = self.beside(line.view(self.layout.world_size, -1))
        torch._foreach_copy_(beside.targets, beside.sources)
        return beside.params

    def beside(self, buffer: Tensor) -> Beside:
        """New memory ``[numel]`` for the whole parameters, and the copies that fill it from ``buffer``."""
        world_size = self.layout.world_size
        # Padded, so that `KeptPart` can cut it into equal parts.
        line = buffer.new_empty(cut(self.layout.numel, world_size) * world_size)
        sources, targets, params = [], [], []
        for index, each in enumerate(self.cuts):
            span = self.layout.param_span(index)
            flat = line[span.start : span.stop]
            params.append(flat.view(each.shape))
            for block in self.layout.blocks[index]:
                if each.dim is None:
                    block = replace(block, rows=Span(0, 1))
                source = each.stacked(block.of(buffer)) if each.dim else block.of(buffer)
                sources.append(source)
                targets.append(each.parts(params[-1]) if each.dim else block.like(flat))
        return Beside(line, params, sources, targets)

    # ---- gradients

    def bucket_views(self, columns: Tensor) -> list[list[Tensor]]:
        """For each parameter, the blocks of ``columns`` ``[W, S]`` with its gradient; the last entry: unused blocks."""
        views = []
        for index, each in enumerate(self.cuts):
            blocks = [block.of(columns) for block in self.layout.blocks[index]]
            views.append([each.stacked(block) for block in blocks] if each.dim else blocks)
        return [*views, [block.of(columns) for block in self.layout.empty_blocks]]

    def cut_as(self, runs: list[Tensor], index: int, value: Tensor) -> Sequence[Tensor]:
        """``value``, the whole parameter ``index``, cut like ``runs``, its `bucket_views`."""
        if self.cuts[index].dim:
            return [self.cuts[index].parts(value) for _ in runs]
        flat = value.reshape(-1)
        return [block.like(flat) for block in self.layout.blocks[index]]


def join_gathers(flat_params: Sequence[FlatParam]) -> None:
    """Make all ``flat_params`` of one unit share one gather; those without elements are left out."""
    joined = [(each, each.line) for each in flat_params if isinstance(each.line, Rows) and each.line.shard_numel]
    if len(joined) < 2 or joined[0][1].layout.world_size == 1:
        return
    joint = JointGather([own if isinstance(own := each.gathered, ExtendedGathered) else each for each, _ in joined])
    deferred, last = DeferredGather(joint), len(joined) - 1
    together = [
        _copied_out(each, rows, joint if index == last else deferred, columns)
        for index, ((each, rows), columns) in enumerate(zip(joined, joint.columns, strict=True))
    ]
    for (each, _), gathered in zip(joined, together, strict=True):
        gathered.share(joint, together)
        each.gather_into(gathered)
    free_storage_(joint.buffer)  # last: freed memory cannot be viewed


def _copied_out(flat_param: FlatParam, rows: Rows, gather: Gather, columns: Tensor) -> CopiedOut:
    """Memory of the whole parameters of ``flat_param``, copied out of ``columns`` of a buffer that ``gather`` fills."""
    own = flat_param.gathered
    if isinstance(own, ExtendedGathered):
        return own.joined(gather, columns)
    return CopiedOut(gather, columns, rows.rank, rows.beside(columns))
