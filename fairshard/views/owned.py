"""Parameters that are each whole on one rank, on a line in the order of their owners.

The gathered line is what computes, and ranks send rows of unequal width, without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fairshard.params.flat_param import FlatParam
from fairshard.params.gathered import Gather
from fairshard.utils.collectives import Communicator
from fairshard.utils.owned_bucket import OwnedBucket
from fairshard.utils.owned_layout import OwnedLayout
from fairshard.utils.ragged_tensor import RaggedShard
from fairshard.utils.span import cut
from fairshard.utils.unequal_rows import UnequalGather
from fairshard.views.ragged import Ragged


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


def check_none_owned(flat_params: Sequence[FlatParam], what: str) -> None:
    """Raise if parameters have owners: ``what`` communicates rows of equal width.

    Raises:
        ValueError: names the first such parameter.
    """
    for flat_param in flat_params:
        if isinstance(flat_param.line.layout, OwnedLayout):
            raise ValueError(
                f"`{what}` must communicate equally many elements of all ranks, but `{flat_param.slots[0].fqn}` is "
                "placed by Owned, whole on one rank. Place the parameters of this unit otherwise."
            )
