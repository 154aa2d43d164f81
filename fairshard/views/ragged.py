"""Parameters that are cut between blocks only.

The gathered line is what computes, as for a flat line: nothing is copied out of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fairshard.utils.ragged_layout import RaggedLayout
from fairshard.utils.ragged_tensor import RaggedShard
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
