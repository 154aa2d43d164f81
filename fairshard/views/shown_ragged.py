"""Parameters of which ranks have unequal numbers of rows, registered as DTensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from fairshard.params.slot import ParamSlot
from fairshard.utils.owned_layout import OwnedLayout
from fairshard.utils.ragged_layout import RaggedLayout
from fairshard.utils.ragged_tensor import RaggedTensor
from fairshard.views.owned import OwnedLine
from fairshard.views.ragged import Ragged
from fairshard.views.shown_dtensors import ShownDTensors


def ragged_line(shapes: Sequence[torch.Size], rank: int, layout: RaggedLayout) -> Ragged:
    """The line of parameters of ``shapes`` that ``layout`` lays out by blocks, or by owners."""
    return OwnedLine(shapes, rank, layout) if isinstance(layout, OwnedLayout) else Ragged(shapes, rank, layout)


class ShownRagged(ShownDTensors):
    """A `RaggedTensor` for each parameter, on the ranks of the last dimension of ``mesh``."""

    line: Ragged  # type: ignore[assignment]
    kind = RaggedTensor

    def __init__(self, slots: list[ParamSlot], mesh: DeviceMesh, layout: RaggedLayout, on_cpu: bool) -> None:
        self._layout = layout
        super().__init__(slots, mesh, [0] * len(slots), on_cpu)

    def _line_of(self, slots: Sequence[ParamSlot], rank: int, world_size: int) -> Ragged:
        return ragged_line([slot.shape for slot in slots], rank, self._layout)

    def placement(self, index: int) -> Placement:
        """The rows of parameter ``index`` on each rank."""
        return self.line.placement(index)
