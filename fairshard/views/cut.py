"""How one parameter is cut among ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """How one parameter of shape ``shape`` is cut among ranks: along ``dim``, or not at all if that is None.

    Along another dimension than the first, evenly: what a rank has lies in its memory in order, as torch's DTensors do.
    """

    shape: torch.Size
    dim: int | None
    world_size: int

    @property
    def size(self) -> tuple[int | None, int]:
        """Rows, and elements a row."""
        if self.dim is None:
            return None, self.shape.numel()
        rest = [size for dim, size in enumerate(self.shape) if dim != self.dim]
        return self.shape[self.dim], torch.Size(rest).numel()

    def shape_of(self, num_rows: int) -> tuple[int, ...]:
        """What a rank has that has ``num_rows`` rows."""
        return tuple(num_rows if dim == self.dim else size for dim, size in enumerate(self.shape))

    def parts(self, whole: Tensor) -> Tensor:
        """``whole``, cut along another dimension than the first, as ``[W, ...]``: each rank's part; a view."""
        assert self.dim
        sizes = self.world_size, self.shape[self.dim] // self.world_size
        return torch.movedim(torch.unflatten(whole, self.dim, sizes), self.dim, 0)

    def stacked(self, block: Tensor) -> Tensor:
        """``block`` ``[W, n]``, which holds the whole parameter, as `parts` of it."""
        assert self.dim
        return block.view(self.world_size, *self.shape_of(self.shape[self.dim] // self.world_size))
