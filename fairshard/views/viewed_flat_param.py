"""``use_orig_params``: what this rank owns of each original parameter, registered under that parameter's names.

The unit still gathers and reduces one flat line; what is registered are views of this rank's shard::

    parameters    | weight ------------------------ | bias - |
    rows          |    rank 0    |    rank 1    |  rank 2  | pad |
    rank 1        |              | weight (14,) |               bias (0,): rank 1 owns nothing of it

*Invariant*: a view lies in the shard and shares its version counter; its ``.grad`` lies in the shard's gradient and
has a counter of its own, which tells who zeroed one parameter's gradient and left its neighbours'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fairshard.errors import FairshardError
from fairshard.params.flat_param import FlatParam
from fairshard.params.shard_grad import GradTransfers, ShardGrad
from fairshard.params.slot import ParamSlot
from fairshard.settings.config import UnitConfig
from fairshard.utils.collectives import Communicators
from fairshard.utils.layout import FlatLayout, Piece
from fairshard.utils.span import Span
from fairshard.utils.storage import is_same_memory
from fairshard.views.viewed_grad import OrigGrad, ViewedGrad


class ViewedFlatParam(FlatParam):
    """A flat param of which optimizers see a view for each original parameter, ``[n]`` with ``n >= 0``."""

    make_grad: Callable[..., ShardGrad] = ViewedGrad

    def __init__(self, slots: list[ParamSlot], name: str, rank: int, world_size: int, on_cpu: bool = False) -> None:
        super().__init__(slots, name, rank, world_size, on_cpu)
        self.registered = self.make_views()
        for slot, view in zip(slots, self.registered, strict=True):
            slot.register(view)
        self._stepped = [OrigParam(self, index) for index in range(len(slots))]

    def make_views(self) -> tuple[nn.Parameter, ...]:
        """What is registered: this rank's run of each parameter, as a view of the shard."""
        runs = self.runs_of(self.shard.detach())
        return tuple(nn.Parameter(run, requires_grad=self.requires_grad) for _, run in runs)

    def own_of(self, index: int) -> Tensor:
        """The elements that this rank holds in ``registered[index]``, as they lie in memory."""
        return self.elements_of(index, self.registered[index])

    def elements_of(self, index: int, value: Tensor) -> Tensor:
        """This rank's elements of ``value``, which is shaped as ``registered[index]`` is."""
        return value.detach()

    def shown_as(self, index: int, run: Tensor) -> Tensor:
        """``run``, this rank's elements of parameter ``index``, shaped as ``registered[index]`` is; no copy."""
        return run

    def look_at(self, index: int, run: Tensor) -> None:
        """Let ``registered[index]`` show ``run``."""
        self.registered[index].data = run

    @property
    def stepped(self) -> Sequence[OrigParam]:
        """Each original parameter, as far as this rank owns it."""
        return self._stepped

    def materialize(self, comms: Communicators, config: UnitConfig, transfers: GradTransfers, on_grad: Any) -> None:
        """As for any flat param; the views follow the shard to where it goes."""
        self.settle()
        super().materialize(comms, config, transfers, on_grad)
        self._link()
        self.grad.show_on(self.registered, self._own_spans())

    def move_to(self, device: torch.device) -> None:
        """Move the shard to ``device``."""
        super().move_to(device)
        self._link()

    def keep_on_device(self) -> None:
        """Keep the shard and its gradient on the compute device, whatever the unit was asked for."""
        super().keep_on_device()
        self._link()

    def begin_pass(self) -> None:
        """Follow what the user may have done to the views since the last pass: values, ``requires_grad``, gradients."""
        if self._own_addresses() != self._addresses:
            self.settle()
        self._check_leaves()  # before what it compares with follows the views
        if [view.requires_grad for view in self.registered] != self._trained:
            self._follow_requires_grad()
            self._hook_leaves()
        super().begin_pass()
        self.grad.forget_dropped()

    @torch.no_grad()
    def settle(self) -> None:
        """Take in what was assigned to ``.data`` of views, as ``module.to()`` does, and let them view the shard again.

        Raises:
            ValueError: a view has another size than this rank owns of the parameter.
            TypeError: views have several dtypes or devices, or changed theirs after the first forward.
        """
        runs = [run for _, run in self.runs_of(self.shard.detach())]
        values = [self.own_of(index) for index in range(len(self.slots))]
        if all(is_same_memory(value, run) for value, run in zip(values, runs, strict=True)):
            return
        self._check_moved(values, runs)
        values = [value.clone() for value in values]
        if values[0].dtype != self.shard.dtype or values[0].device != self.shard.device:
            self.renew_shard(values[0].new_zeros(self.shard_numel))
        for index, (_, run) in enumerate(self.runs_of(self.shard.detach())):
            if run.numel():
                run.copy_(values[index])
        self._link()
        if self.grad is not None:
            self.grad.settle()

    def renew_shard(self, shard: Tensor) -> None:
        """Keep the shard in ``shard``, of another dtype or device."""
        self.shard.data = shard

    def forget_zeroed(self) -> None:
        """Drop what was accumulated for each parameter whose gradient the user has zeroed since."""
        if self._marker is None:
            return
        zeroed = self.grad.zeroed_since(self._marker, [slot.fqn for slot in self.slots])
        if len(zeroed) == len(self.slots):
            self._marker = None
            self.drop_grads()
        for index in zeroed:
            self._drop_accumulated(index)

    def _is_partial(self) -> bool:
        try:
            zeroed = self.grad.zeroed_since(self._partial, [slot.fqn for slot in self.slots])
        except FairshardError:  # they were scaled, say
            return True
        return len(zeroed) < len(self.slots)

    def _drop_accumulated(self, index: int) -> None:
        self.slots[index].leaf.grad = None
        self._kept[index] = 0
        if self._accumulated is not None:
            span = self.layout.param_span(index)
            self._accumulated[span.start : span.stop].zero_()

    def _follow_requires_grad(self) -> None:
        """Let each leaf want a gradient if its view does."""
        self._trained = [view.requires_grad for view in self.registered]
        self.requires_grad = any(self._trained)
        self.shard.requires_grad_(self.requires_grad)
        for index, trains in enumerate(self._trained):
            self.slots[index].leaf.requires_grad_(trains)
            if not trains:
                self._drop_accumulated(index)

    def _link(self) -> None:
        """Let the views lie in the shard, wherever that is now."""
        for index, (_, run) in enumerate(self.runs_of(self.shard.detach())):
            self.look_at(index, run)
        self._addresses = self._own_addresses()

    def _own_addresses(self) -> list[int]:
        return [self.own_of(index).data_ptr() for index in range(len(self.slots))]

    def _own_spans(self) -> list[Span]:
        """Where on the shard the views lie, in order."""
        own = {piece.index: piece.target for piece in self.layout.pieces_of(self.rank)}
        spans, end = [], 0
        for index in range(len(self.slots)):
            spans.append(own.get(index, Span(end, end)))
            end = spans[-1].stop
        return spans

    def _check_moved(self, values: list[Tensor], runs: list[Tensor]) -> None:
        first = values[0]
        for slot, view, run in zip(self.slots, values, runs, strict=True):
            where = f"`{slot.fqn}` (rank {self.rank})"
            if view.shape != run.shape:
                raise ValueError(
                    f"What is assigned to `.data` of a parameter must have the size that this rank owns, but that of "
                    f"{where} has shape {tuple(view.shape)} where {tuple(run.shape)} is owned. Set whole values inside "
                    "summon_full_params, or load a state dict."
                )
            kept = (view.dtype, view.device) == (run.dtype, run.device)
            if (view.dtype, view.device) != (first.dtype, first.device) or not (kept or self.comm is None):
                raise TypeError(
                    f"The parameters of a unit must keep one dtype and one device, but {where} went from {run.dtype} "
                    f"on {run.device} to {view.dtype} on {view.device}. Convert the whole model, before its first "
                    "forward."
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.versioned = (self.shard, *self.registered)  # copies have counters of their own
        self._stepped = [OrigParam(self, index) for index in range(len(self.slots))]
        self._link()


class OrigParam:
    """One original parameter, as far as this rank owns it: a flat param's interface to optimizers and their state.

    Its line is ``[W, n]``: each rank's run of the parameter, padded to ``n``, the longest.
    """

    def __init__(self, whole: ViewedFlatParam, index: int) -> None:
        self.move_to(whole, index)

    def move_to(self, whole: ViewedFlatParam, index: int) -> None:
        """Be parameter ``index`` of ``whole``."""
        self.__dict__.clear()  # the layout among others
        self._whole = whole
        self._index = index
        self.slots = [whole.slots[index]]
        self.shard = whole.registered[index]
        self.shard_numel = whole.own_of(index).numel()

    def take(self, param: Any) -> Any:
        """What is registered, with the values of ``param``; as `RowsFlatParam.take`."""
        return self._whole.take(self._index, param)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        """Ranks, devices and the like are the flat param's."""
        return getattr(self._whole, name)

    @cached_property
    def layout(self) -> _Runs:
        """Where each rank's run lies."""
        return _Runs.of(self._whole.layout, self._index)

    @property
    def name(self) -> str:
        """The original parameter's name."""
        return self.slots[0].fqn

    @property
    def grad(self) -> Any:
        """The `OrigGrad` of this parameter; None before the first forward."""
        return None if self._whole.grad is None else OrigGrad(self._whole.grad, self._index)

    def own_of(self, value: Tensor) -> Tensor:
        """This rank's elements ``[shard_numel]`` of ``value``, which is shaped as ``shard`` is."""
        return self._whole.elements_of(self._index, value)

    def shown(self, own: Tensor) -> Tensor:
        """``own`` ``[shard_numel]`` shaped as ``shard`` is, a DTensor if that is one; no copy."""
        return self._whole.shown_as(self._index, own)

    def gather_line(self, values: Tensor) -> Tensor:
        """``values`` ``[shard_numel]`` of every rank as a line ``[W, n]`` on the compute device. **Collective.**"""
        whole = self._whole
        line = values.new_zeros(whole.layout.world_size, self.layout.shard_numel, device=whole.compute_device)
        line[whole.rank, : self.shard_numel] = values
        return whole.gather_rows(line)

    def params_of(self, line: Tensor) -> list[Tensor]:
        """The parameter, shaped, of a line ``[W, n]``."""
        runs = [line[piece.row, : piece.target.stop] for piece in self.layout.pieces]
        return [(torch.cat(runs) if runs else line.new_empty(0)).view(self.slots[0].shape)]

    def lay_out(self, values: list[Tensor]) -> Tensor:
        """The whole parameter as a line ``[W, n]`` in new memory."""
        line = values[0].new_zeros(self._whole.layout.world_size, self.layout.shard_numel)
        whole = values[0].reshape(-1)
        for piece in self.layout.pieces:
            line[piece.row, : piece.target.stop] = whole[piece.source.start : piece.source.stop]
        return line

    def shaped(self, index: int, flat: Tensor) -> Tensor:
        """The parameter of its elements in the order in which they are cut."""
        return self._whole.shaped(self._index, flat)

    def runs_of(self, values: Tensor) -> list[tuple[int, Tensor]]:
        """``values`` ``[shard_numel]`` as a view, behind the number of the first element that this rank owns."""
        own = self.layout.pieces_of(self._whole.rank)
        return [(own[0].source.start if own else 0, values[:])]


@dataclass(frozen=True)
class _Runs:
    """The runs into which the rows cut one parameter, each at the beginning of a row of ``shard_numel`` elements."""

    pieces: tuple[Piece, ...]
    shard_numel: int

    @staticmethod
    def of(layout: FlatLayout, index: int) -> _Runs:
        own = [piece for piece in layout.pieces if piece.index == index]
        pieces = tuple(Piece(0, piece.row, piece.source, Span(0, piece.source.numel)) for piece in own)
        return _Runs(pieces, max((piece.source.numel for piece in own), default=0))

    def pieces_of(self, rank: int) -> list[Piece]:
        return [piece for piece in self.pieces if piece.row == rank]


Stepped = FlatParam | OrigParam  # what an optimizer sees the shard of
