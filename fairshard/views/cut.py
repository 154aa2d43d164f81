"""How one parameter is cut among ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
