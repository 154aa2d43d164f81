"""Parameters that are each cut by rows, as DTensors are; converts whole values to rows and back.

A row of the buffer ``[W, S]`` holds the rows of all parameters on one rank, side by side. Whole parameters are copied
out of it into separate memory, in one copy. A unit of one parameter needs no copy: its rows are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fairshard.params.flat_param import FlatParam
from fairshard.params.gathered import Gather, Gathered
from fairshard.params.line import FlatLine
from fairshard.utils.collectives import Communicator, RowGather, UserGather
from fairshard.utils.placed_layout import RowsLayout
from fairshard.utils.span import Span
from fairshard.utils.storage import free_storage_
from fairshard.utils.transfers import Transfer
from fairshard.views.copied_out import Beside, CopiedOut, aligned_params, byte_columns, is_to_align, row_nbytes
from fairshard.views.received_in_place import PartGather, ReceivedInPlace, large_params


@dataclass(frozen=True)
class Cut:
    """How a parameter of shape ``shape`` is cut among ranks: along ``dim``; None keeps it whole on every rank.

    A dimension other than the first is cut evenly. A rank's part is contiguous in its memory, as in torch's DTensors.
    """

    shape: torch.Size
    dim: int | None
    world_size: int

    @property
    def size(self) -> tuple[int | None, int]:
        """The number of rows (None for a parameter that is not cut), and of elements in a row."""
        if self.dim is None:
            return None, self.shape.numel()
        rest = [size for dim, size in enumerate(self.shape) if dim != self.dim]
        return self.shape[self.dim], torch.Size(rest).numel()

    def shape_of(self, num_rows: int) -> tuple[int, ...]:
        """The shape of the part of a rank that has ``num_rows`` rows."""
        return tuple(num_rows if dim == self.dim else size for dim, size in enumerate(self.shape))

    def parts(self, whole: Tensor) -> Tensor:
        """The ranks' parts of ``whole``, as a view ``[W, ...]``; ``dim`` must not be the first."""
        assert self.dim
        sizes = self.world_size, self.shape[self.dim] // self.world_size
        return torch.movedim(torch.unflatten(whole, self.dim, sizes), self.dim, 0)

    def stacked(self, block: Tensor) -> Tensor:
        """``block`` ``[W, n]``, which holds the whole parameter, in the shape of `parts`."""
        assert self.dim
        return block.view(self.world_size, *self.shape_of(self.shape[self.dim] // self.world_size))


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
        joint = JointGather(joined[0][0].comm, [each.gathered.buffer for each, _ in joined])
        deferred, last = DeferredGather(joint), len(joined) - 1
        together: list[CopiedOut] = []
        for index, ((each, rows), columns) in enumerate(zip(joined, joint.columns, strict=True)):
            gather: Gather = joint if index == last else deferred
            each.gather_into(rows.joined(each.gathered, gather, columns, together))
        free_storage_(joint.buffer)  # last: freed memory cannot be viewed

    def joined(self, before: Gathered, gather: Gather, columns: Tensor, together: list[CopiedOut]) -> Gathered:
        """Memory to replace ``before``: the whole parameters, copied out of ``columns``, which ``gather`` fills."""
        return CopiedOut(gather, columns, columns[self.rank], self.beside(columns), together)


def is_ordered(line: FlatLine, index: int) -> bool:
    """Whether the elements of parameter ``index`` are cut in the order of their memory."""
    return not (isinstance(line, Rows) and line.cuts[index].dim)


class JointGather(Transfer):
    """One gather for all flat params of a unit that has several, because of several dtypes or frozen parameters.

    The rows of all ``buffers`` lie side by side in one buffer of bytes, aligned, and are gathered after the last one
    was written::

        buffer [W, bytes]    | bf16, trained | fp32, trained | fp32, frozen |
    """

    __slots__ = ("_gather", "_next", "_transfer", "buffer", "columns")

    def __init__(self, comm: Communicator, buffers: Sequence[Tensor]) -> None:
        super().__init__()
        kinds = [(each.size(1), each.dtype) for each in buffers]
        self.buffer = torch.empty(comm.world_size, row_nbytes(kinds), dtype=torch.uint8, device=buffers[0].device)
        self.columns = byte_columns(self.buffer, kinds)
        self._gather = self._next = RowGather(comm, self.buffer)
        self._transfer: Transfer | None = None

    def start(self, tag: int) -> Transfer:
        """Gather all rows; this rank's are already written. **Collective.**"""
        gather, self._next = self._next, self._gather
        self._transfer = gather.start(tag)
        return self

    def through(self, user: UserGather | None) -> JointGather:
        """Itself; the next start gathers by ``user``."""
        self._next = self._gather.through(user)
        return self

    def wait(self) -> None:
        """Wait for all rows."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.wait()


class DeferredGather:
    """Replaces the gather of a flat param that is not the last of its unit: the last one starts ``joint``."""

    def __init__(self, joint: JointGather) -> None:
        self._joint = joint

    def start(self, tag: int) -> Transfer:
        """Return the transfer of all flat params; starts nothing."""
        return self._joint

    def through(self, user: UserGather | None) -> DeferredGather:
        """Itself: it gathers nothing."""
        return self
