"""The gradient of a shard of rows, shown as a DTensor on each parameter.

torch does not count writes to a DTensor by ``foreach`` and fused functions. Therefore changes of gradients are also
detected by their first elements, in which `ViewedGrad.mark` turns zeros into -0.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fairshard.params.shard_grad import is_zeroed
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

    def mark(self) -> Any:
        """See `ViewedGrad.mark`. In addition, returns the first elements of all gradients on this rank."""
        marks = super().mark()
        return marks, self._first_elements()

    def zeroed_since(self, marks: Any, names: Sequence[str]) -> list[int]:
        """See `ViewedGrad.zeroed_since`.

        If all parameters with elements on this rank were zeroed by writes that torch did not count, parameters
        without elements also count as zeroed.
        """
        counted, before = marks
        zeroed = set(super().zeroed_since(counted, names))
        if self.value is None:
            return list(range(len(names)))
        now = self._first_elements()
        if torch.equal(before.view(torch.uint8), now.view(torch.uint8)):
            return sorted(zeroed)
        differs = (before.view(-1, 1).view(torch.uint8) != now.view(-1, 1).view(torch.uint8)).any(dim=1).tolist()
        with_elements = [index for index, run in enumerate(self._runs) if run.numel()]
        uncounted = set()
        for index, is_other in zip(with_elements, differs, strict=True):
            if is_other and index not in zeroed:
                never_counted = self._runs[index], -1
                if is_zeroed(self._shows[index], never_counted, names[index], self._runs[index]):
                    uncounted.add(index)
        if uncounted.issuperset(with_elements):
            return list(range(len(names)))
        return sorted(zeroed | uncounted)

    def _first_elements(self) -> Tensor:
        whole = self.value
        assert whole is not None
        return whole[self._heads]
