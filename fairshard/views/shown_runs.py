"""``use_orig_params``: this rank's run of each original parameter, registered under that parameter's names.

The unit still gathers and reduces one flat line; the registered parameters are views of this rank's shard::

    parameters    | weight ------------------------ | bias - |
    rows          |    rank 0    |    rank 1    |  rank 2  | pad |
    rank 1        |              | weight (14,) |               bias (0,): rank 1 owns nothing of it

*Invariant*: a view lies in the shard and shares its version counter; its ``.grad`` lies in the shard's gradient and
has its own counter, so that zeroing the gradient of one parameter only is detected.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from fairshard.params.line import FlatLine
from fairshard.params.rule import GradHome
from fairshard.params.shard_grad import GradTransfers, ShardGrad
from fairshard.params.shown import ShownShard
from fairshard.params.slot import ParamSlot
from fairshard.utils.pinned import host_empty_like
from fairshard.utils.span import Span
from fairshard.utils.storage import set_data
from fairshard.utils.tensors import is_same_memory
from fairshard.views.orig_param import OrigParam
from fairshard.views.viewed_grad import ViewedGrad

_TRAINS = attrgetter("requires_grad")  # `map` with it costs less host time than a loop


class ShownRuns(ShownShard):
    """A view of the shard for each original parameter, ``[n]`` with ``n >= 0``, or in the parameter's shape."""

    def __init__(self, slots: list[ParamSlot], line: FlatLine, on_cpu: bool = False) -> None:
        super().__init__(slots, line, on_cpu)
        self.registered = self._make_views()
        for slot, view in zip(slots, self.registered, strict=True):
            slot.register(view)
        self._stepped: list[OrigParam] = []
        self._addresses = self._own_addresses()

    def _make_views(self) -> tuple[nn.Parameter, ...]:
        """This rank's run of each parameter, as a view of the shard."""
        runs = enumerate(self.line.runs_of(self.shard.detach()))
        views = [self.shown_as(index, run) for index, (_, run) in runs]
        return tuple(nn.Parameter(view, requires_grad=self.shard.requires_grad) for view in views)

    def own_of(self, index: int) -> Tensor:
        """This rank's elements of ``registered[index]``, in memory order."""
        return self.elements_of(index, self.registered[index])

    def elements_of(self, index: int, value: Tensor) -> Tensor:
        """This rank's elements of ``value``, shaped like ``registered[index]``, in memory order; a view if it can."""
        return value.detach().reshape(-1) if self.keeps_shapes else value.detach()

    def shown_as(self, index: int, run: Tensor) -> Tensor:
        """``run``, this rank's elements of parameter ``index``, in the shape of ``registered[index]``; no copy."""
        return run.view(self.slots[index].shape) if self.keeps_shapes else run

    def set_view(self, index: int, run: Tensor) -> None:
        """Make ``registered[index]`` a view of ``run``."""
        set_data(self.registered[index], self.shown_as(index, run))

    def stepped_by(self, flat_param: Any) -> Sequence[OrigParam]:
        """The `OrigParam` of each original parameter."""
        if not self._stepped:
            self._stepped = [OrigParam(flat_param, index) for index in range(len(self.slots))]
        return self._stepped

    def make_grad(self, dtype: torch.dtype, home: GradHome, transfers: GradTransfers, held: Tensor | None) -> ShardGrad:
        """The gradient of the shard, shown on the views."""
        grad = self._new_grad(self.shard, dtype, home, transfers, held)
        grad.show_on(self.registered, self.own_spans())
        return grad

    def _new_grad(self, *args: Any) -> ViewedGrad:
        return WholeGrad(*args) if self.keeps_shapes else ViewedGrad(*args)

    # ---- following

    def wanted(self) -> bytes:
        """See `ShownShard.wanted`."""
        return bytes(map(_TRAINS, self.registered))

    def adopt_requires_grad(self, before: bytes, name: str) -> None:
        """Set ``requires_grad`` of registered parameters to that of leaves that differ from ``before``."""
        for slot, view, trained in zip(self.slots, self.registered, before, strict=True):
            if slot.leaf.requires_grad != trained:
                view.requires_grad_(slot.leaf.requires_grad)

    @property
    def addressed(self) -> tuple[nn.Parameter, ...]:
        """See `ShownShard.addressed`."""
        return (self.shard, *self.registered)

    @property
    def has_moved(self) -> bool:
        """Whether a view no longer lies in the shard, or lost its shape."""
        return self._own_addresses() != self._addresses or (self.keeps_shapes and self._has_other_shapes)

    @property
    def _has_other_shapes(self) -> bool:
        return any(own.shape != slot.shape for own, slot in zip(self.registered, self.slots, strict=True))

    @torch.no_grad()
    def adopt_assigned(self, is_fixed: bool) -> bool:
        """Adopt tensors assigned to ``.data`` of views, as ``module.to()`` does; then all views lie in the shard.

        Raises:
            ValueError: a view differs in size from this rank's run of the parameter, or in shape.
            TypeError: views have several dtypes or devices, or ``is_fixed`` and these have changed.
        """
        runs = [run for _, run in self.line.runs_of(self.shard.detach())]
        values = [self.own_of(index) for index in range(len(self.slots))]
        is_same = all(is_same_memory(value, run) for value, run in zip(values, runs, strict=True))
        if is_same and not (self.keeps_shapes and self._has_other_shapes):
            return False
        if self.keeps_shapes:
            shaped = [self.shown_as(index, run) for index, run in enumerate(runs)]
            self._check_moved([own.detach() for own in self.registered], shaped, is_fixed)
        else:
            self._check_moved(values, runs, is_fixed)
        # New memory, because the user may hold what the shard was: `backup = p.data; p.data = other; p.data = backup`.
        with torch.inference_mode(False):
            self._renew_shard(self._zeros_like(values[0], is_fixed))
            for value, (_, run) in zip(values, self.line.runs_of(self.shard.detach()), strict=True):
                run.copy_(value)  # counts as a write to the shard
            self.link()
        return True

    def _zeros_like(self, value: Tensor, is_fixed: bool) -> Tensor:
        """Memory ``[S]`` of the dtype and device of ``value``; pinned if ``is_fixed`` and a GPU reads it."""
        if is_fixed and self.on_cpu:
            return host_empty_like(self.shard, self.slots[0].leaf.device).zero_()
        return value.new_zeros(self.line.shard_numel)

    def _renew_shard(self, shard: Tensor) -> None:
        """Use ``shard`` as the memory of the shard."""
        set_data(self.shard, shard)

    def link(self) -> None:
        """Make the registered parameters views of the shard's current memory."""
        for index, (_, run) in enumerate(self.line.runs_of(self.shard.detach())):
            self.set_view(index, run)
        self._addresses = self._own_addresses()

    def _own_addresses(self) -> list[int]:
        return [self.own_of(index).data_ptr() for index in range(len(self.slots))]

    def own_spans(self) -> list[Span]:
        """The span of each view on the shard, in order."""
        own = {piece.index: piece.target for piece in self.line.layout.pieces_of(self.line.rank)}
        spans, end = [], 0
        for index in range(len(self.slots)):
            spans.append(own.get(index, Span(end, end)))
            end = spans[-1].stop
        return spans

    def _check_moved(self, values: list[Tensor], runs: list[Tensor], is_fixed: bool) -> None:
        first = values[0]
        for slot, view, run in zip(self.slots, values, runs, strict=True):
            where = f"`{slot.fqn}` (rank {self.line.rank})"
            if view.shape != run.shape:
                raise ValueError(
                    f"A tensor assigned to `.data` of a parameter must have the size that this rank owns, but for "
                    f"{where} it has shape {tuple(view.shape)}, not {tuple(run.shape)}. Set whole values inside "
                    "summon_full_params, or load a state dict."
                )
            kept = (view.dtype, view.device) == (run.dtype, run.device)
            if (view.dtype, view.device) != (first.dtype, first.device) or not (kept or not is_fixed):
                raise TypeError(
                    f"The parameters of a unit must keep one dtype and one device, but {where} went from {run.dtype} "
                    f"on {run.device} to {view.dtype} on {view.device}. Convert the whole model, before its first "
                    "forward."
                )

    # ---- copies

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.versioned = (self.shard, *self.registered)  # copies have new version counters
        self._stepped = []
        self.link()


class ShownWhole(ShownRuns):
    """See `ShownRuns`. One rank has all, nothing is cut: registered parameters and gradients have their own shapes."""

    keeps_shapes = True


class WholeGrad(ViewedGrad):
    """The gradient of a shard, shown on each registered parameter in that parameter's shape."""

    def parts_of(self, whole: Tensor) -> list[Tensor]:
        """See `ViewedGrad.parts_of`."""
        return [part.view(view.shape) for part, view in zip(super().parts_of(whole), self._views, strict=True)]

    def form_of(self, index: int, run: Tensor) -> Tensor:
        """``run`` in the shape of the parameter."""
        return run.view(self._views[index].shape)
