"""The gradient of a shard as gradients of original parameters: one memory, shown in runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fairshard.nn.data_parallel.shard_grad import GradTransfers, ShardGrad, is_zeroed, sign_zeros_
from fairshard.utils.storage import is_same_memory


class ViewedGrad(ShardGrad):
    """The gradient of a shard, shown on a view of the shard for each original parameter.

    What is on the views is the truth: a gradient taken off one counts as zeros, another put there is copied in, and
    when all are gone there is none. Held gradients are shown here, not on the views.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._views: Sequence[nn.Parameter] = ()
        self._lengths: list[int] = []
        self._runs: list[Tensor] = []  # of the gradient [S], while there is one
        self._held_runs: list[Tensor | None] = []  # those of them that were not taken off

    def show_on(self, views: Sequence[nn.Parameter], lengths: list[int]) -> None:
        """Show the gradient on ``views``, which own ``lengths`` elements of it, and take what is on them already."""
        self._views = views
        self._lengths = lengths
        self._cut(super().value)
        if self.is_held:
            self._held_runs = list(self._runs)
        for view, run in zip(self._views, self._runs, strict=bool(self._runs)):
            if view.grad is not None and is_same_memory(view.grad, run):
                view.grad = run

    @property
    def value(self) -> Tensor | None:
        """The gradient ``[S]``, with what was done to those of single parameters since."""
        whole = super().value
        shown = self._shown()
        if whole is None:
            if all(grad is None for grad in shown):
                return None
            whole = torch.zeros_like(self._shard)
            super()._set(whole)
            self._cut(whole)
        elif all(grad is run for grad, run in zip(shown, self._runs, strict=True)):
            return whole
        if all(grad is None for grad in shown):
            self._set(None)
            return None
        with torch.no_grad():
            for index, (grad, run) in enumerate(zip(shown, self._runs, strict=True)):
                if grad is None:
                    run.zero_()
                elif grad is not run:
                    run.copy_(grad)
                    self._views[index].grad = run
        return whole

    def forget_dropped(self) -> None:
        """Give back the memory of gradients that were all taken off."""
        if super().value is not None and all(grad is None for grad in self._shown()):
            self._set(None)

    def of(self, index: int) -> Tensor | None:
        """The gradient of one original parameter; looks at no other."""
        return self._held_runs[index] if self.is_held and self._held_runs else self._views[index].grad

    def drop(self, index: int) -> None:
        """Take the gradient off one original parameter."""
        self._views[index].grad = None
        if self._held_runs:
            self._held_runs[index] = None

    def add(self, reduced: Tensor) -> None:
        """Set or add ``reduced``; on its way until `land` if it moves."""
        if self.is_on_host:
            self.forget_dropped()  # or their memory would count as in use
        super().add(reduced)

    def value_or_zeros(self) -> Tensor:
        """The gradient; one of zeros is made if there is none, and shown where it was not."""
        whole = super().value_or_zeros()
        self._show()
        return whole

    def zero(self, set_to_none: bool) -> None:
        """Drop the gradient, or write zeros over it, and drop what is under way."""
        self.discard_flights()
        if set_to_none:
            self._set(None)
        elif self.value is not None:
            for run in self._runs:
                run.zero_()

    def mark(self) -> Any:
        """The gradient of each parameter, of zeros if there is none, as it is now, for `zeroed_since`."""
        self.land()
        whole = self.value_or_zeros()
        starts = itertools.accumulate(self._lengths, initial=0)
        heads = [start for start, length in zip(starts, self._lengths, strict=False) if length]
        first = whole[heads]
        sign_zeros_(first)
        whole[heads] = first
        return [None if grad is None else (grad, grad._version) for grad in self._shown()]

    def zeroed_since(self, marks: Any, names: Sequence[str]) -> list[int]:
        """The parameters whose gradient was dropped or zeroed after `mark`; raises as `is_zeroed` does."""
        shown = zip(marks, self._shown(), names, strict=True)
        return [i for i, (mark, grad, name) in enumerate(shown) if mark is None or is_zeroed(grad, mark, name)]

    @torch.no_grad()
    def settle(self) -> None:
        """Take in what was assigned to ``.data`` of gradients, as ``module._apply`` does."""
        whole = super().value
        if whole is None:
            return
        before = [run.clone() for run in self._runs]
        shown = [grad is not None for grad in self._shown()]
        self._cut(whole)
        for run, value in zip(self._runs, before, strict=True):
            run.copy_(value)
        self._show(shown)

    def _shown(self) -> Sequence[Tensor | None]:
        if self.is_held:
            return self._held_runs or [None] * len(self._views)
        return [view.grad for view in self._views]

    def _cut(self, whole: Tensor | None) -> None:
        """Look at ``whole`` ``[S]`` run by run, each with a version counter of its own."""
        if whole is None:
            self._runs = []
            return
        padding = whole.numel() - sum(self._lengths)
        self._runs = [run.data for run in torch.split_with_sizes(whole, [*self._lengths, padding])[:-1]]

    def _show(self, which: Sequence[bool] | None = None) -> None:
        if self.is_held:
            self._held_runs = list(self._runs)
            return
        for index, (view, run) in enumerate(zip(self._views, self._runs, strict=True)):
            if view.grad is not run and (view.requires_grad if which is None else which[index]):
                view.grad = run

    def _set(self, grad: Tensor | None) -> None:
        super()._set(grad)
        self._cut(grad)
        if grad is not None:
            self._show()
            return
        self._held_runs = []
        for view in self._views:
            view.grad = None

    def _set_or_add(self, grad: Tensor) -> None:
        super()._set_or_add(grad)
        self._show()


class OrigGrad:
    """The gradient of one original parameter, as `ShardGrad` is of a whole shard."""

    def __init__(self, whole: ViewedGrad, index: int) -> None:
        self._whole = whole
        self._index = index

    @property
    def value(self) -> Tensor | None:
        """The gradient ``[shard_numel]``, wherever it is."""
        return self._whole.of(self._index)

    @property
    def is_held(self) -> bool:
        """Whether it is held on the compute device, and not on the parameter."""
        return self._whole.is_held

    @property
    def transfers(self) -> GradTransfers:
        """What the gradients of the model share."""
        return self._whole.transfers

    def land(self, counts: bool = True) -> None:
        """Make visible what is on its way to host memory."""
        self._whole.land(counts)

    def zero(self, set_to_none: bool) -> None:
        """Drop or zero this parameter's part, once what is under way has landed."""
        self._whole.land()
        value = self.value
        if set_to_none:
            self._whole.drop(self._index)
        elif value is not None:
            value.zero_()
