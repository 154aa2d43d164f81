"""The gradient of a shard of rows, shown as a DTensor on each parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fairshard.params.slot import ParamSlot
from fairshard.views.viewed_grad import ViewedGrad


class Shown(Protocol):
    """The interface of the registered parameters that the gradient uses."""

    slots: list[ParamSlot]

    @property
    def rank(self) -> int:
        """This rank's number among the ranks that share the parameters."""
        ...

    def all_shown_as(self, runs: Sequence[Tensor]) -> list[DTensor]:
        """``runs``, this rank's elements of each parameter, as DTensors."""
        ...

    def shown_as(self, index: int, run: Tensor) -> DTensor:
        """``run``, this rank's elements of one parameter, as a DTensor."""
        ...

    def elements_of(self, index: int, value: Tensor) -> Tensor:
        """This rank's elements of ``value``, which is a DTensor or has the shape of parameter ``index``."""
        ...


class RowsGrad(ViewedGrad):
    """The gradient of a shard that is registered as the DTensors of ``shown``."""

    def __init__(self, shown: Shown, *args: Any) -> None:
        super().__init__(*args)
        self._shown_params = shown

    def shows_of(self, whole: Tensor) -> Sequence[Tensor]:
        """A DTensor of each run."""
        return self._shown_params.all_shown_as(self.parts_of(whole.data))

    def form_of(self, index: int, run: Tensor) -> Tensor:
        """A DTensor of ``run``."""
        return self._shown_params.shown_as(index, run)

    def own_of(self, index: int, grad: Tensor) -> Tensor:
        """This rank's elements of ``grad``, which may be a tensor that the user has assigned.

        Raises:
            ValueError: it is a DTensor placed differently than the parameter.
        """
        param: Any = self._views[index]
        if isinstance(grad, DTensor) and (grad.placements, grad.device_mesh) != (param.placements, param.device_mesh):
            raise ValueError(
                f"A gradient must be placed like its parameter, but that of "
                f"`{self._shown_params.slots[index].fqn}` (rank {self._shown_params.rank}) is {grad.placements}, not "
                f"{param.placements}. Put `grad.redistribute(param.device_mesh, param.placements)` there."
            )
        return self._shown_params.elements_of(index, grad)

    def zeroed_uncounted(self, placeholders: Mapping[int, Tensor], counted: set[int]) -> set[int]:
        """See `ShardGrad.zeroed_uncounted`; all faces, if none with elements is left."""
        found = [(face, self.own_of(face, placeholder)) for face, placeholder in sorted(placeholders.items())]
        heads = {face: own.reshape(-1)[:1] for face, own in found if own.numel()}
        left = [face for face in heads if face not in counted]
        signs = torch.cat([heads[face] for face in left]).signbit().tolist() if left else []
        zeroed = {face for face, is_untouched in zip(left, signs, strict=True) if not is_untouched}
        return set(placeholders) if heads and len(zeroed) == len(left) else zeroed
