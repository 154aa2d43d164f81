"""Parameters that are cut between blocks only, registered as DTensors with unequal numbers of rows.

The gathered line is what computes, as for a flat line: nothing is copied out of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from fairshard.params.line import FlatLine
from fairshard.params.slot import ParamSlot
from fairshard.utils.ragged_layout import RaggedLayout
from fairshard.utils.ragged_tensor import RaggedShard, RaggedTensor
from fairshard.views.shown_dtensors import ShownDTensors


class Ragged(FlatLine):
    """Parameters at the places that ``layout`` gives them; blocks are whole rows."""

    layout: RaggedLayout

    def __init__(self, shapes: Sequence[torch.Size], rank: int, layout: RaggedLayout) -> None:
        super().__init__(shapes, rank, layout)
        self.numel = layout.padded_numel

    def of(self, indexes: Sequence[int]) -> Ragged:
        """The parameters ``indexes`` only, each cut as it is here."""
        return Ragged([self.shapes[index] for index in indexes], self.rank, self.layout.of(indexes))

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


class ShownRagged(ShownDTensors):
    """A `RaggedTensor` for each parameter, on the ranks of the last dimension of ``mesh``."""

    line: Ragged  # type: ignore[assignment]
    kind = RaggedTensor

    def __init__(self, slots: list[ParamSlot], mesh: DeviceMesh, layout: RaggedLayout, on_cpu: bool) -> None:
        self._layout = layout
        super().__init__(slots, mesh, [0] * len(slots), on_cpu)

    def _line_of(self, slots: Sequence[ParamSlot], rank: int, world_size: int) -> Ragged:
        return Ragged([slot.shape for slot in slots], rank, self._layout)

    def placement(self, index: int) -> Placement:
        """The rows of parameter ``index`` on each rank."""
        return self.line.placement(index)
