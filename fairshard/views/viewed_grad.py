"""The gradient of a shard as gradients of original parameters, which are views of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fairshard.params.rule import GradHome
from fairshard.params.shard_grad import ShardGrad
from fairshard.utils.span import Span
from fairshard.utils.tensors import is_same_memory


class ViewedGrad(ShardGrad):
    """The gradient of a shard, shown as ``.grad`` of the view of each original parameter.

    The gradients on the views are authoritative: a view without a gradient counts as zeros, a tensor that the user
    assigns is copied into the shard's gradient, and the shard has no gradient if no view has one. Held gradients are
    kept here, not on the views.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._views: Sequence[nn.Parameter] = ()
        self._sizes: list[int] = []  # sizes of runs and of the gaps between them, in order
        self._places: list[int] = []  # indexes of the runs in `_sizes`
        self._whole: Tensor | None = None  # the gradient [S], as it was cut last
        self._cut_runs: list[Tensor] | None = None  # see `_runs`
        self._shows: Sequence[Tensor] = ()  # each run as it is shown on its view
        self._copied: list[Tensor] = []  # gradients that a backward's streams may still read
        self._faces: Sequence[Any] = ()  # that have the gradients as `.grad`: the views, if gradients are not held

    def show_on(self, views: Sequence[nn.Parameter], spans: Sequence[Span]) -> None:
        """Show the gradient of each of ``spans`` on its view, and adopt gradients that the views already have.

        The spans are in ascending order, and may leave gaps.
        """
        self._views = self._faces = views
        self._sizes, self._places, end = [], [], 0
        for start, numel in [*((span.start, span.numel) for span in spans), (self._shard.numel(), 0)]:
            self._sizes += [start - end] if start > end else []
            self._places.append(len(self._sizes))
            self._sizes.append(numel)
            end = start + numel
        self._places.pop()  # the end of the shard
        self._cut(self._at.grad)
        if self.home is GradHome.HELD:
            held: Sequence[Tensor | None] = self._runs or [None] * len(views)
            self._faces = [SimpleNamespace(grad=run) for run in held]
        for index, (run, show) in enumerate(zip(self._runs, self._shows, strict=True)):
            grad = views[index].grad
            if grad is not None and run.numel() and is_same_memory(self.own_of(index, grad), run):
                views[index].grad = show

    def shows_of(self, whole: Tensor) -> Sequence[Tensor]:
        """The runs of ``whole`` ``[S]`` in the form of the views' gradients."""
        return self._runs

    def own_of(self, index: int, grad: Tensor) -> Tensor:
        """This rank's elements of ``grad``, the gradient of view ``index``, in memory order."""
        return grad

    @property
    def shown(self) -> Sequence[Tensor | None]:
        """The gradient of each view, or its placeholder."""
        return list(map(_GRAD, self._faces))

    def show(self, face: int, grad: Tensor | None) -> None:
        """See `ShardGrad.show`."""
        self._faces[face].grad = grad

    def new(self, face: int, value: float, shares_memory: bool = False) -> Tensor:
        """See `ShardGrad.new`."""
        return self.form_of(face, self._filled((self._sizes[self._places[face]],), value, shares_memory))

    def form_of(self, index: int, run: Tensor) -> Tensor:
        """``run`` in the form of the gradient of view ``index``; no copy."""
        return run

    @property
    def value(self) -> Tensor | None:
        """The reduced gradient ``[S]``, including changes that users have made to gradients of single parameters."""
        whole: Tensor | None = self._at.grad
        grads = self._grads()
        if _are_all_none(grads):
            self.forget_dropped()
            return None
        if whole is None:
            whole = self._filled(self._shard.shape, 0.0, shares_memory=False)
            super()._set(whole)
            self._cut(whole)
        elif _are_same(grads, self._shows):
            return whole
        with torch.no_grad():
            for index, (grad, run, show) in enumerate(zip(grads, self._runs, self._shows, strict=True)):
                if grad is None:
                    run.zero_()
                elif grad is not show:
                    run.copy_(self.own_of(index, grad))
                    self._copied.append(grad)
                    self._show_behind(index, show)
        return whole

    def begin_backward(self) -> None:
        """See `ShardGrad.begin_backward`."""
        super().begin_backward()
        self._copied.clear()

    def _grads(self) -> Sequence[Tensor | None]:
        """The reduced gradient of each view."""
        shown, pending = self.shown, self.pending
        return shown if pending is None else [pending.behind(index, grad) for index, grad in enumerate(shown)]

    def forget_dropped(self) -> None:
        """Free the memory of the gradients, if the user has dropped all of them."""
        if self._at.grad is not None and self.pending is None and _are_all_none(self.shown):
            self._forget()

    def add(self, reduced: Tensor, reached: bytes) -> None:
        """See `ShardGrad.add`. A parameter that was not reached and has no gradient keeps None."""
        if self.home is GradHome.HOST:
            self.forget_dropped()  # otherwise their memory would count as in use
        super().add(reduced, reached)

    def value_or_zeros(self) -> Tensor:
        """The reduced gradient; creates zeros if missing, and shows it on the views of all trained parameters."""
        whole = self.value
        if whole is None:
            whole = self._filled(self._shard.shape, 0.0, shares_memory=False)
            super()._set(whole)
            self._cut(whole)
        self._show()
        return whole

    @torch.no_grad()
    def adopt_assigned(self) -> None:
        """Adopt tensors assigned to ``.data`` of gradients, as ``module._apply`` does."""
        whole = self._at.grad
        if whole is None:
            return
        shown, parts = self._grads(), self.parts_of(whole)
        values = [None if grad is None else self.own_of(index, grad) for index, grad in enumerate(shown)]
        if all(one is None or is_same_memory(one, part) for one, part in zip(values, parts, strict=True)):
            return
        before = [run.clone() for run in self._runs]
        self._cut(whole)
        for run, value in zip(self._runs, before, strict=True):
            run.copy_(value)
        self._show([grad is not None for grad in shown])

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
        """Make runs the reduced gradients of ``which`` parameters; None: of those that are trained."""
        if which is None:
            which = [True] * len(self._views) if self.home is GradHome.HELD else list(map(_TRAINS, self._views))
        for index, (show, is_shown) in enumerate(zip(self._shows, which, strict=True)):
            if is_shown:
                self._show_behind(index, show)

    def _set(self, grad: Tensor | None) -> None:
        if grad is None:
            self._forget()
            for face in self._faces:
                face.grad = None
        else:
            super()._set(grad)
            self._cut(grad)
            self._show([True] * len(self._views))

    def _forget(self) -> None:
        """Free the memory; the views have no gradients, or lose them next."""
        super()._set(None)
        self._cut(None)

    def _set_or_add(self, grad: Tensor, reached: bytes, lost: Collection[int]) -> Sequence[int]:
        grads = self._grads()
        if 0 not in reached and not lost and _are_all_none(grads):  # the usual case: the rest takes too much host time
            self._set(grad.data)  # with its own version counter, not the whole bucket's
            return b"\1" * len(self._views)
        own = [index not in lost and one == 1 for index, one in enumerate(reached)]
        created = bytes(one is None and index not in lost for index, one in enumerate(grads))
        kept = self.value
        if kept is not None:
            kept.add_(grad)
        elif True in own:
            super()._set(grad.data)
            self._cut(grad.data)
        else:
            return created
        self._show(own)
        return created


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
        """The reduced gradient ``[shard_numel]``, wherever it is kept."""
        return self._whole.of(self._index)

    @property
    def shown(self) -> Sequence[Tensor | None]:
        """The gradient that users see, or its placeholder."""
        return (self._whole.shown[self._index],)

    def __getattr__(self, name: str) -> Any:
        """All other attributes (home, transfers, how it lands) are those of the whole gradient."""
        return getattr(self._whole, name)

    def zero(self, set_to_none: bool) -> None:
        """Drop or zero this parameter's part, after landing all copies."""
        self._whole.land()
        (shown,) = self.shown
        if set_to_none:
            self._whole.show(self._index, None)
        elif shown is not None:
            shown.zero_()
