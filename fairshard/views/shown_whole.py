"""Parameters of a unit on one rank, registered in their own shapes: nothing is cut there.

The unit still has one flat shard for each flat param; the registered parameters, and their gradients, are views of it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fairshard.utils.storage import set_data
from fairshard.views.shown_runs import ShownRuns
from fairshard.views.viewed_grad import ViewedGrad


class ShownWhole(ShownRuns):
    """A view of the shard for each original parameter, in the parameter's shape; the shard belongs to one rank."""

    keeps_shapes = True

    def _make_views(self) -> tuple[nn.Parameter, ...]:
        runs = self.line.runs_of(self.shard.detach())
        views = [self.shown_as(index, run) for index, (_, run) in enumerate(runs)]
        return tuple(nn.Parameter(view, requires_grad=self.shard.requires_grad) for view in views)

    def elements_of(self, index: int, value: Tensor) -> Tensor:
        """The elements of ``value``, which has the shape of parameter ``index``, in memory order; a view if it can."""
        return value.detach().reshape(-1)

    def shown_as(self, index: int, run: Tensor) -> Tensor:
        """``run``, the elements of parameter ``index``, in that parameter's shape; no copy."""
        return run.view(self.slots[index].shape)

    def set_view(self, index: int, run: Tensor) -> None:
        """Make ``registered[index]`` a view of ``run``."""
        set_data(self.registered[index], self.shown_as(index, run))

    @property
    def has_moved(self) -> bool:
        """Whether a view no longer lies in the shard, or lost its shape."""
        return super().has_moved or self._has_other_shapes

    def adopt_assigned(self, is_fixed: bool) -> bool:
        """See `ShownRuns.adopt_assigned`. A tensor of another shape is refused, whatever its memory."""
        if self._has_other_shapes:
            runs = [run for _, run in self.line.runs_of(self.shard.detach())]
            self._check_moved(runs, runs, is_fixed)
        return super().adopt_assigned(is_fixed)

    @property
    def _has_other_shapes(self) -> bool:
        return any(own.shape != slot.shape for own, slot in zip(self.registered, self.slots, strict=True))

    def _new_grad(self, *args: Any) -> ViewedGrad:
        return WholeGrad(*args)

    def _check_moved(self, values: list[Tensor], runs: list[Tensor], is_fixed: bool) -> None:
        shaped = [self.shown_as(index, run) for index, run in enumerate(runs)]
        super()._check_moved([own.detach() for own in self.registered], shaped, is_fixed)


class WholeGrad(ViewedGrad):
    """The gradient of a shard, shown on each registered parameter in that parameter's shape."""

    def parts_of(self, whole: Tensor) -> list[Tensor]:
        """See `ViewedGrad.parts_of`."""
        return [part.view(view.shape) for part, view in zip(super().parts_of(whole), self._views, strict=True)]
