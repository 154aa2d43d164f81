"""The gradient of a shard as gradients of original parameters, which are views of it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from fairshard.params.shard_grad import GradTransfers, ShardGrad, is_placeholder, is_zeroed, marked, sign_zeros_
from fairshard.utils.span import Span
from fairshard.utils.storage import is_same_memory


class ViewedGrad(ShardGrad):
    """The gradient of a shard, shown as ``.grad`` of the view of each original parameter.

    The gradients on the views are authoritative: a view without a gradient counts as zeros, a tensor that the user
    assigns is copied into the shard's gradient, and the shard has no gradient if no view has one. Held gradients are
    kept here, not on the views.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._views: Sequence[nn.Parameter] = ()
        self._heads: list[int] = []  # the first element of each non-empty run
        self._sizes: list[int] = []  # sizes of runs and of the gaps between them, in order
        self._places: list[int] = []  # indexes of the runs in `_sizes`
        self._whole: Tensor | None = None  # the gradient [S], as it was cut last
        self._cut_runs: list[Tensor] | None = None  # see `_runs`
        self._shows: Sequence[Tensor] = ()  # each run as it is shown on its view
        self._held_runs: list[Tensor | None] = []  # if gradients are held: the runs, None for those dropped
        self._hidden: dict[int, Tensor] = {}  # zeros that `hide_zeros_of` has hidden, by parameter
        self._had_none: bytearray = bytearray()  # parameters whose gradient was None before `mark` created zeros
        self._were_none = bytearray()  # parameters whose gradient was None before the last one was added

    def show_on(self, views: Sequence[nn.Parameter], spans: Sequence[Span]) -> None:
        """Show the gradient of each of ``spans`` on its view, and adopt gradients that the views already have.

        The spans are in ascending order, and may leave gaps.
        """
        self._views = views
        self._heads = [span.start for span in spans if span.numel]
        self._sizes, self._places, end = [], [], 0
        for start, numel in [*((span.start, span.numel) for span in spans), (self._shard.numel(), 0)]:
            self._sizes += [start - end] if start > end else []
            self._places.append(len(self._sizes))
            self._sizes.append(numel)
            end = start + numel
        self._places.pop()  # the end of the shard
        self._cut(super().value)
        if self.is_held:
            self._held_runs = list(self._runs)
        for index, (run, show) in enumerate(zip(self._runs, self._shows, strict=True)):
            grad = views[index].grad
            if grad is not None and is_same_memory(self.own_of(index, grad), run):
                views[index].grad = show

    def shows_of(self, whole: Tensor) -> Sequence[Tensor]:
        """The runs of ``whole`` ``[S]`` in the form of the views' gradients."""
        return self._runs

    def own_of(self, index: int, grad: Tensor) -> Tensor:
        """This rank's elements of ``grad``, the gradient of view ``index``, in memory order."""
        return grad

    @property
    def value(self) -> Tensor | None:
        """The gradient ``[S]``, including changes that users have made to the gradients of single parameters."""
        whole = super().value
        shown = self._shown()
        if _are_all_none(shown):
            if whole is not None and not self._hidden:
                self._set(None)
            return None
        if whole is None:
            whole = torch.zeros_like(self._shard)
            super()._set(whole)
            self._cut(whole)
        elif _are_same(shown, self._shows):
            return whole
        with torch.no_grad():
            for index, (grad, run, show) in enumerate(zip(shown, self._runs, self._shows, strict=True)):
                if grad is None:
                    if index not in self._hidden:
                        run.zero_()
                elif grad is not show:
                    run.copy_(self.own_of(index, grad))
                    self._views[index].grad = show
        return whole

    def forget_dropped(self) -> None:
        """Free the memory of the gradients, if the user has dropped all of them."""
        if super().value is not None and not self._hidden and _are_all_none(self._shown()):
            self._forget()

    def of(self, index: int) -> Tensor | None:
        """The gradient of one original parameter; reads no other."""
        return self._held_runs[index] if self.is_held and self._held_runs else self._views[index].grad

    def drop(self, index: int) -> None:
        """Drop the gradient of one original parameter."""
        self._views[index].grad = None
        if self._held_runs:
            self._held_runs[index] = None

    def add(self, reduced: Tensor, reached: bytes | None = None, given: bytes | None = None) -> None:
        """See `ShardGrad.add`. A parameter that was not reached and has no gradient keeps None."""
        if self.is_on_host:
            self.forget_dropped()  # otherwise their memory would count as in use
        super().add(reduced, reached, given)

    def value_or_zeros(self) -> Tensor:
        """The gradient; creates zeros if missing, and shows it on all views."""
        whole = super().value_or_zeros()
        self._show()
        return whole

    def retract(self, reached: bytearray) -> None:
        """Drop gradients that the last backward created for parameters that it has not ``reached``."""
        for index, (own, none) in enumerate(zip(reached, self._were_none, strict=True)):
            if none and not own:
                self.drop(index)

    @property
    def has_zeros(self) -> bool:
        """See `ShardGrad.has_zeros`."""
        return 1 in self._had_none

    def hide_zeros_of(self, index: int) -> bool:
        """Like `ShardGrad.hide_zeros`, for the gradient of one original parameter."""
        grad = self.of(index)
        if not self._had_none or not self._had_none[index] or grad is None or self.is_held:
            return False
        if not is_placeholder(self.own_of(index, grad)):
            return False
        self._hidden[index] = grad
        self.drop(index)
        return True

    def show_zeros(self) -> None:
        """Undo `hide_zeros_of` of all parameters, except those that have a gradient again."""
        for index in list(self._hidden):
            self.show_zeros_of(index)

    def show_zeros_of(self, index: int) -> None:
        """Undo `hide_zeros_of`, unless there is a gradient again."""
        grad = self._hidden.pop(index, None)
        if grad is not None and self._views[index].grad is None:
            self._views[index].grad = grad

    def zero(self, set_to_none: bool) -> None:
        """Drop the gradient or overwrite it with zeros, and discard copies in flight."""
        self.discard_flights()
        self._hidden = {}
        if set_to_none:
            self._set(None)
        elif self.value is not None:
            for run in self._runs:
                run.zero_()

    def mark(self) -> Any:
        """Record the current gradient of each parameter (zeros if missing) for `zeroed_since`."""
        self.land()
        if not self._had_none:
            self._had_none = bytearray(len(self._views))
        for index, grad in enumerate(self._shown() or ()):
            self._had_none[index] |= grad is None
        if 1 in self._had_none:
            marked.add(self)
        whole = self.value_or_zeros()
        first = whole[self._heads]
        sign_zeros_(first)
        whole[self._heads] = first
        return [None if grad is None else (grad, grad._version) for grad in self._shown()]

    def zeroed_since(self, marks: Any, names: Sequence[str]) -> list[int]:
        """Indexes of parameters whose gradient was dropped or zeroed after `mark`; raises as `is_zeroed`."""
        zeroed = []
        for index, (mark, grad, name) in enumerate(zip(marks, self._shown(), names, strict=True)):
            if mark is None or is_zeroed(grad, mark, name, None if grad is None else self.own_of(index, grad)):
                zeroed.append(index)
        return zeroed

    @torch.no_grad()
    def adopt_assigned(self) -> None:
        """Adopt tensors assigned to ``.data`` of gradients, as ``module._apply`` does."""
        whole = super().value
        if whole is None:
            return
        shown, parts = self._shown(), self.parts_of(whole)
        values = [None if grad is None else self.own_of(index, grad) for index, grad in enumerate(shown)]
        if all(one is None or is_same_memory(one, part) for one, part in zip(values, parts, strict=True)):
            return
        before = [run.clone() for run in self._runs]
        self._cut(whole)
        for run, value in zip(self._runs, before, strict=True):
            run.copy_(value)
        self._show([grad is not None for grad in shown])

    def _shown(self) -> Sequence[Tensor | None]:
        if self.is_held:
            return self._held_runs or [None] * len(self._views)
        return list(map(_GRAD, self._views))

    @property
    def _runs(self) -> list[Tensor]:
        """Views of the gradient ``[S]``, each with its own version counter; empty without one. Made when needed."""
        if self._cut_runs is None:
            self._cut_runs = [] if self._whole is None else [part.data for part in self.parts_of(self._whole)]
        return self._cut_runs

    def parts_of(self, whole: Tensor) -> list[Tensor]:
        """The part of ``whole`` ``[S]`` for each view."""
        parts = torch.split_with_sizes(whole, self._sizes)
        return [parts[place] for place in self._places]

    def _cut(self, whole: Tensor | None) -> None:
        """Make `_runs` and what is shown views of ``whole`` ``[S]``."""
        self._whole, self._cut_runs = whole, None
        self._shows = () if whole is None else self.shows_of(whole)

    def _show(self, which: Sequence[bool] | None = None) -> None:
        """Show ``which`` gradients on their views; None: those of parameters that are trained."""
        if self.is_held:
            self._held_runs = list(self._runs)
            return
        if which is None:
            which = list(map(_TRAINS, self._views))
        for view, show, is_shown in zip(self._views, self._shows, which, strict=True):
            if is_shown:
                view.grad = show

    def _set(self, grad: Tensor | None, which: Sequence[bool] | None = None) -> None:
        if grad is None:
            self._forget()
            for view in self._views:
                view.grad = None
        else:
            super()._set(grad)
            self._cut(grad)
            self._show(which)

    def _forget(self) -> None:
        """Free the memory; the views have no gradients, or lose them next."""
        super()._set(None)
        self._cut(None)
        self._held_runs = []
        self._had_none = bytearray()
        self._hidden = {}

    def _set_or_add(self, grad: Tensor, reached: bytes | None, given: bytes | None) -> None:
        had_none = self._had_none or bytes(len(self._views))
        shown = self._shown() or had_none
        gets = self._receivers(grad, given)
        if reached is None and _are_all_none(shown):  # the usual case, for which the rest takes too much host time
            self._were_none = bytearray(b"\1") * len(self._views)
            self._is_new = True
            self._set(grad.data, gets)  # with its own version counter, not the whole bucket's
            self._had_none = bytearray()
            return
        self._were_none = bytearray([none or grad is None for grad, none in zip(shown, had_none)])  # noqa: B905
        if reached is None:
            self._add_to(self.value, grad)
            self._show(gets)
        else:
            which = [bool(own) or not none for own, none in zip(reached, self._were_none, strict=True)]
            self._add_to(self.value, grad)
            self._show([gets_it and own for gets_it, own in zip(gets, which, strict=True)])
            for index, own in enumerate(which):
                if not own:
                    self.drop(index)
        self._had_none = bytearray()

    def _receivers(self, grad: Tensor, given: bytes | None) -> list[bool]:
        """Which parameters get their part of ``grad``; see `ShardGrad.add`."""
        if given is None:
            return [True] * len(self._views)
        gets = [bool(own) or view.requires_grad for own, view in zip(given, self._views, strict=True)]
        if False in gets:
            gets = [one or bool(part.any()) for one, part in zip(gets, self.parts_of(grad), strict=True)]
        return gets


_GRAD, _TRAINS = attrgetter("grad"), attrgetter("requires_grad")  # `map` with them costs less host time than a loop


def _are_all_none(grads: Sequence[Any]) -> bool:
    for grad in grads:  # noqa: SIM110 (host time)
        if grad is not None:
            return False
    return True


def _are_same(grads: Sequence[Tensor | None], others: Sequence[Tensor]) -> bool:
    for grad, other in zip(grads, others, strict=True):  # noqa: SIM110 (host time)
        if grad is not other:
            return False
    return True


class OrigGrad:
    """The gradient of one original parameter, with the interface of `ShardGrad`."""

    def __init__(self, whole: ViewedGrad, index: int) -> None:
        self._whole = whole
        self._index = index

    @property
    def value(self) -> Tensor | None:
        """The gradient ``[shard_numel]``, wherever it is kept."""
        return self._whole.of(self._index)

    @property
    def is_held(self) -> bool:
        """Whether it is held on the compute device instead of on the parameter."""
        return self._whole.is_held

    @property
    def transfers(self) -> GradTransfers:
        """Shared by all gradients of the model."""
        return self._whole.transfers

    def land(self, counts: bool = True) -> None:
        """Wait for copies to host memory and make their gradients visible."""
        self._whole.land(counts)

    def hide_zeros(self) -> bool:
        """See `ShardGrad.hide_zeros`."""
        return self._whole.hide_zeros_of(self._index)

    def show_zeros(self) -> None:
        """See `ShardGrad.show_zeros`."""
        self._whole.show_zeros_of(self._index)

    def zero(self, set_to_none: bool) -> None:
        """Drop or zero this parameter's part, after landing all copies."""
        self._whole.land()
        value = self.value
        if set_to_none:
            self._whole.drop(self._index)
        elif value is not None:
            value.zero_()
