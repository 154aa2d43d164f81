"""The gradient of a shard of rows, shown as a DTensor on each parameter.

torch counts no write that a ``foreach`` or fused function makes to a DTensor. So whether gradients were zeroed or
changed is read from their first elements too, those that `ViewedGrad.mark` signs.
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
    """What the gradient asks of what is registered."""

    slots: list[ParamSlot]

    @property
    def rank(self) -> int:
        """This rank among those that share the parameters."""
        ...

    def shown_as(self, index: int, run: Tensor) -> Tensor:
        """``run``, this rank's elements of parameter ``index``, as a DTensor."""
        ...

    def elements_of(self, index: int, value: Tensor) -> Tensor:
        """This rank's elements of ``value``, shaped as parameter ``index`` or a DTensor of that."""
        ...


class RowsGrad(ViewedGrad):
    """The gradient of the shard of which ``shown`` is registered."""

    def __init__(self, shown: Shown, *args: Any) -> None:
        super().__init__(*args)
        self._shown_params = shown

    def shown_as(self, runs: list[Tensor]) -> Sequence[Tensor]:
        """A DTensor of each run."""
        return [self._shown_params.shown_as(index, run) for index, run in enumerate(runs)]

    def own_of(self, index: int, grad: Tensor) -> Tensor:
        """This rank's elements, also of what the user has put in place of what was shown.

        Raises:
            ValueError: that is a DTensor of which this rank has other elements than of the parameter.
        """
        param: Any = self._views[index]
        if isinstance(grad, DTensor) and (grad.placements, grad.device_mesh) != (param.placements, param.device_mesh):
            raise ValueError(
                f"The gradient of a parameter must be placed as that is, but that of "
                f"`{self._shown_params.slots[index].fqn}` (rank {self._shown_params.rank}) is {grad.placements}, not "
                f"{param.placements}. Put `grad.redistribute(param.device_mesh, param.placements)` there."
            )
        return self._shown_params.elements_of(index, grad)

    def mark(self) -> Any:
        """As `ViewedGrad.mark`, with the first element of each gradient that has any here."""
        marks = super().mark()
        return marks, self._first_elements()

    def zeroed_since(self, marks: Any, names: Sequence[str]) -> list[int]:
        """As `ViewedGrad.zeroed_since`.

        A parameter of which this rank has no elements counts as zeroed if all were, uncounted, of which it has some.
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
