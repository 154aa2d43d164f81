"""Parameters laid end to end on a line; converts whole values to rows and back. No communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fairshard.params.gathered import Gather, Gathered
from fairshard.utils.buckets import Bucket
from fairshard.utils.collectives import Communicator, RowGather
from fairshard.utils.layout import Block, FlatLayout

_MAX_ROWS_APART = {"cpu": 6, "device": 64}
"""Up to this many rows of a block are copied one by one. With more, one strided view takes less host time on the CPU;
one kernel of CUDA's foreach copy fills up to 64 contiguous tensors."""


class FlatLine:
    """Parameters of ``shapes`` on a line ``[W, S]``, of which this rank owns row ``rank``."""

    bucket_kind = Bucket

    def __init__(self, shapes: Sequence[torch.Size], rank: int, layout: FlatLayout) -> None:
        self.shapes = list(shapes)
        self.rank = rank
        self.layout = layout
        self.shard_numel = layout.shard_numel
        self.numel = layout.numel  # where the last parameter ends

    @classmethod
    def among(cls, shapes: Sequence[torch.Size], rank: int, world_size: int) -> FlatLine:
        """A line of ``shapes``, one after the other, cut into equal rows for ``world_size`` ranks."""
        return cls(shapes, rank, FlatLayout([shape.numel() for shape in shapes], world_size))

    def flattened(self, index: int, value: Tensor) -> Tensor:
        """The elements of ``value``, the whole parameter ``index``, in the order in which they are cut."""
        return value.reshape(-1)

    def shaped(self, index: int, flat: Tensor) -> Tensor:
        """The whole parameter ``index``, from its elements ``flat`` in the order of `flattened`."""
        return flat.view(self.shapes[index])

    @torch.no_grad()
    def cut(self, values: list[Tensor]) -> Tensor:
        """This rank's shard ``[S]`` of whole parameters ``values``, padded with zeros, in new memory."""
        with torch.inference_mode(False):
            shard = values[0].new_zeros(self.shard_numel)
        for piece in self.layout.pieces_of(self.rank):
            whole = self.flattened(piece.index, values[piece.index])
            shard[piece.target.start : piece.target.stop] = whole[piece.source.start : piece.source.stop]
        return shard

    def gathered_in(self, buffer: Tensor, comm: Communicator) -> Gathered:
        """Memory of the whole parameters, gathered into ``buffer`` ``[W, S]``; subclasses may copy out of it."""
        return self.in_place(buffer, comm)

    def in_place(self, buffer: Tensor, comm: Communicator) -> Gathered:
        """Memory of the whole parameters: ``buffer`` ``[W, S]`` itself, to which the leaves point."""
        return Gathered(self.gather_of(buffer, comm), buffer, self.row_of(buffer), self.params_of(buffer))

    def empty(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """New memory for a whole line."""
        return torch.empty(self.layout.world_size, self.shard_numel, dtype=dtype, device=device)

    @staticmethod
    def join_gathers(flat_params: Sequence[Any]) -> None:
        """Let ``flat_params``, all of one unit, share one gather, if their kind of line can; this one cannot."""

    def row_of(self, line: Tensor) -> Tensor:
        """This rank's row of a whole ``line``, as a view."""
        return line[self.rank]

    def gather_of(self, line: Tensor, comm: Communicator) -> Gather:
        """The gather that fills a whole ``line``; the caller writes this rank's row first."""
        return RowGather(comm, line)

    def params_of(self, line: Tensor) -> list[Tensor]:
        """The parameters, shaped, as views of a whole line of ``W * S`` elements."""
        line = line.view(-1)
        spans = map(self.layout.param_span, range(len(self.shapes)))
        return [line[span.start : span.stop].view(shape) for shape, span in zip(self.shapes, spans, strict=True)]

    def runs_of(self, values: Tensor) -> list[tuple[int, Tensor]]:
        """This rank's run of each parameter: the index of its first element, and a view of ``values`` ``[S]``."""
        runs = [(0, values[:0]) for _ in self.shapes]
        for piece in self.layout.pieces_of(self.rank):
            runs[piece.index] = piece.source.start, values[piece.target.start : piece.target.stop]
        return runs

    def bucket_views(self, columns: Any) -> list[list[Tensor]]:
        """For each parameter, the runs of ``columns`` ``[W, S]`` for its gradient; the last entry: the padding."""
        if columns.is_contiguous():
            gaps = [columns.view(-1)[gap.start : gap.stop] for gap in self.layout.gaps]
            return [*([whole] for whole in self.params_of(columns)), gaps]
        views = [[run for block in blocks for run in _runs(block, columns)] for blocks in self.layout.blocks]
        for runs, shape in zip(views, self.shapes, strict=True):
            if len(runs) == 1 and runs[0].is_contiguous():
                runs[:] = [runs[0].view(shape)]
        return [*views, [block.of(columns) for block in self.layout.empty_blocks]]

    def cut_as(self, runs: list[Tensor], index: int, value: Tensor) -> Sequence[Tensor]:
        """``value``, the whole parameter ``index``, cut like ``runs``, its `bucket_views`."""
        if len(runs) == 1:
            return [value.reshape_as(runs[0])]  # faster than with a torch.Size
        parts = torch.split_with_sizes(value.reshape(-1), [run.numel() for run in runs])
        return [part if run.dim() == 1 else part.view(run.shape) for part, run in zip(parts, runs, strict=True)]


def _runs(block: Block, columns: Tensor) -> Sequence[Tensor]:
    """``block`` of ``columns`` ``[W, S]``; if there are few rows, one by one."""
    part = block.of(columns)
    return part.unbind() if len(part) <= _MAX_ROWS_APART["cpu" if part.is_cpu else "device"] else [part]
