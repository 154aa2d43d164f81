"""Parameters that are cut between blocks only, or are each whole on one rank, in the order of their owners.

The gathered line is what computes, as for a flat line: nothing is copied out of it. Ranks send rows of equal width of
the former, and of unequal width, without padding, of the latter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fairshard.params.flat_param import FlatParam
from fairshard.params.gathered import Gather
from fairshard.utils.buckets import Bucket
from fairshard.utils.collectives import Communicator
from fairshard.utils.placed_layout import OwnedLayout, RaggedLayout
from fairshard.utils.ragged_tensor import RaggedShard
from fairshard.utils.span import cut
from fairshard.utils.transfers import Transfer
from fairshard.utils.unequal_rows import UnequalGather, reduce_rows
from fairshard.views.copied_out import AlignedLine


class Ragged(AlignedLine):
    """Parameters at the places that ``layout`` gives them; blocks are whole rows."""

    layout: RaggedLayout

    def __init__(self, shapes: Sequence[torch.Size], rank: int, layout: RaggedLayout) -> None:
        super().__init__(shapes, rank, layout)
        self.numel = layout.padded_numel

    def of(self, indexes: Sequence[int]) -> Ragged:
        """The parameters ``indexes`` only, each cut as it is here."""
        return type(self)([self.shapes[index] for index in indexes], self.rank, self.layout.of(indexes))

    def placement(self, index: int) -> RaggedShard:
        """The rows of parameter ``index`` on each rank."""
        shape, span, width = self.shapes[index], self.layout.param_span(index), self.shard_numel
        row_numel = shape[1:].numel()
        if not span.numel or not row_numel:
            return RaggedShard(0, shape[0], 0)
        first = span.start // width
        head = min(span.stop, (first + 1) * width) - span.start
        return RaggedShard(first, head // row_numel, width // row_numel if head < span.numel else 0)

    def own_shape(self, index: int) -> tuple[int, ...]:
        """The shape of this rank's rows of parameter ``index``."""
        shape = self.shapes[index]
        return self.placement(index).rows_on(self.rank, shape[0]).numel, *shape[1:]


class RunsByRank(tuple[Tensor, ...]):
    """A source's part of the bucket: for each rank the run of what it owns."""

    def zero_(self) -> None:
        """Fill with zeros."""
        torch._foreach_zero_(self)

    def div_(self, divisor: float) -> None:
        """Divide in place."""
        torch._foreach_div_(self, divisor)


class OwnedBucket(Bucket):
    """A bucket ``[numel]``, in which each rank gets the gradients of the parameters that it owns.

    The gradients for one rank follow each other, so that they are one message, and none of them is padded::

        bucket    | A for rank 0 | B for rank 0 | A for rank 1 | B for rank 1 | ...     units A and B
    """

    def _make_columns(self) -> Sequence[RunsByRank]:
        first, widths = self.sources[0], [source.line.layout.widths for source in self.sources]
        by_rank = list(zip(*widths, strict=True))
        self.data = torch.empty(sum(map(sum, by_rank)), dtype=first.reduce_dtype, device=first.compute_device)
        self._rows = self.data.split([sum(each) for each in by_rank])
        runs = self.data.split([width for each in by_rank for width in each])
        return [RunsByRank(runs[index :: len(widths)]) for index in range(len(widths))]

    def _reduce(self, tag: int) -> Transfer:
        return reduce_rows(self.comms.reduce, self.data, self._rows, tag)


class OwnedLine(Ragged):
    """Parameters at the places that ``layout`` gives them; this rank's shard holds those that it owns."""

    layout: OwnedLayout
    bucket_kind = OwnedBucket

    def __init__(self, shapes: Sequence[torch.Size], rank: int, layout: OwnedLayout) -> None:
        super().__init__(shapes, rank, layout)
        self.shard_numel = layout.widths[rank]

    def placement(self, index: int) -> RaggedShard:
        """All rows of parameter ``index`` on its owner."""
        return RaggedShard(self.layout.owners[index], self.shapes[index][0], 0)

    def rows_of(self, line: Tensor) -> Sequence[Tensor]:
        """Each rank's row of ``line``, as views."""
        rows: Sequence[Tensor] = self._filled(line).split(self.layout.widths)
        return rows

    def _filled(self, line: Tensor) -> Tensor:
        return line.view(-1)[: self.numel]

    def empty(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """New memory for a whole line; its end is padded, so that `KeptPart` can cut it into equal parts."""
        world_size = self.layout.world_size
        return torch.empty(world_size, cut(self.numel, world_size), dtype=dtype, device=device)

    def row_of(self, line: Tensor) -> Tensor:
        """This rank's row of a whole ``line``, as a view."""
        return self.rows_of(line)[self.rank]

    def gather_of(self, line: Tensor, comm: Communicator) -> Gather:
        """The gather that fills a whole ``line``, in which this rank's row is written before."""
        return UnequalGather(comm, self._filled(line), self.rows_of(line))

    def bucket_views(self, columns: Any) -> list[list[Tensor]]:
        """For each parameter, its gradient in ``columns``, the rows of its bucket; then the padding: none."""
        places = enumerate(zip(self.shapes, self.layout.owners, strict=True))
        views = [columns[own][slice(*self.layout.columns_of(index))].view(shape) for index, (shape, own) in places]
        return [*([view] for view in views), []]


def ragged_line(shapes: Sequence[torch.Size], rank: int, layout: RaggedLayout) -> Ragged:
    """The line of parameters of ``shapes`` that ``layout`` lays out by blocks, or by owners."""
    return OwnedLine(shapes, rank, layout) if isinstance(layout, OwnedLayout) else Ragged(shapes, rank, layout)


def check_none_owned(flat_params: Sequence[FlatParam], what: str) -> None:
    """Raise if parameters have owners: ``what`` communicates rows of equal width.

    Raises:
        ValueError: names the first such parameter.
    """
    for flat_param in flat_params:
        if isinstance(flat_param.line, OwnedLine):
            raise ValueError(
                f"`{what}` must communicate equally many elements of all ranks, but `{flat_param.slots[0].fqn}` is "
                "placed by Owned, whole on one rank. Place the parameters of this unit otherwise."
            )
