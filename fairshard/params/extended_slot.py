"""A parameter whose class defines what is gathered: its leaf is made by that class, and keeps its own memory."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from fairshard.params.slot import ParamSlot


class ExtendedSlot(ParamSlot):
    """See `ParamSlot`. The leaf is not the original parameter: it is empty until its first gather makes it.

    Then it stays the same object, of whatever class; `Extension` frees and refills its memory. ``original`` refers to
    the parameter before sharding; None in copies.
    """

    def __init__(self, slot: ParamSlot) -> None:
        super().__init__(slot.leaf, slot.fqn)
        self.original: weakref.ref[nn.Parameter] | None = weakref.ref(slot.leaf)
        self.owners += slot.owners

    def register(self, shard: nn.Parameter | None) -> None:
        """See `ParamSlot.register`. In addition, drops the original parameter, which would keep its memory."""
        super().register(shard)
        self.renew_leaf(self.leaf.device)

    def renew_leaf(self, device: torch.device) -> None:
        """Use an empty leaf on ``device`` until the next gather makes one."""
        self.compute_with(self._empty_leaf(device))

    def _empty_leaf(self, device: torch.device) -> nn.Parameter:
        old = self.leaf
        return nn.Parameter(torch.empty(0, dtype=old.dtype, device=device), requires_grad=old.requires_grad)

    def move_to(self, device: torch.device) -> None:
        """Compute on ``device`` from now on."""
        self.renew_leaf(device)

    def show(self, view: Tensor) -> None:
        """Do nothing: the leaf's own memory is refilled."""

    def clear(self) -> None:
        """Do nothing: the leaf's own memory is freed."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "leaf": self._empty_leaf(self.leaf.device), "original": None}
