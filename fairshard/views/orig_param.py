"""One original parameter of a flat param: the part that this rank owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from fairshard.params.flat_param import FlatParam
from fairshard.utils.layout import FlatLayout, Piece
from fairshard.utils.messages import broadcast
from fairshard.utils.owned_layout import OwnedLayout
from fairshard.utils.span import Span
from fairshard.views.viewed_grad import OrigGrad


class _Runs(Protocol):
    """The registered parameters of a flat param: runs or DTensors; only DTensors have the last two methods."""

    def own_of(self, index: int) -> Tensor: ...

    def elements_of(self, index: int, value: Tensor) -> Tensor: ...

    def shown_as(self, index: int, run: Tensor) -> Tensor: ...

    def adopt(self, index: int, param: Any, is_fixed: bool) -> Any: ...

    def check_not_assigned(self, which: Sequence[int]) -> None: ...


class OrigParam:
    """One original parameter, with the interface of a flat param for optimizers and their state.

    Its line is ``[W, n]``: each rank's run of the parameter, padded to ``n``, the length of the longest run.
    ``index`` is its place among the parameters of the flat param.
    """

    def __init__(self, whole: FlatParam, index: int) -> None:
        self.move_to(whole, index)

    def move_to(self, whole: FlatParam, index: int) -> None:
        """Become parameter ``index`` of ``whole``."""
        self.__dict__.clear()  # also drops the cached layout
        self._whole = whole
        self._shown = cast(_Runs, whole.shows)
        self.index = index
        self.slots = [whole.slots[index]]
        self.shard = whole.registered[index]
        self.shard_numel = self._shown.own_of(index).numel()

    def adopt(self, param: Any) -> Any:
        """Adopt the values of ``param`` and return the registered parameter; see `ShownDTensors.adopt`."""
        return self._shown.adopt(self.index, param, is_fixed=self._whole.comm is not None)

    def check_not_assigned(self) -> None:
        """See `ShownDTensors.check_not_assigned`."""
        self._shown.check_not_assigned((self.index,))

    def __getattr__(self, name: str) -> Any:
        """All other attributes (ranks, devices, dtypes) are those of the flat param."""
        return getattr(self._whole, name)

    @cached_property
    def layout(self) -> _Cuts:
        """The position of each rank's run."""
        return _Cuts.of(self._whole.line.layout, self.index)

    @property
    def name(self) -> str:
        """The original parameter's name."""
        return self.slots[0].fqn

    @property
    def grad(self) -> Any:
        """The `OrigGrad` of this parameter; None before the first forward."""
        return None if self._whole.grad is None else OrigGrad(self._whole.grad, self.index)

    def own_of(self, value: Tensor) -> Tensor:
        """This rank's elements ``[shard_numel]`` of ``value``, which has the shape of ``shard``."""
        return self._shown.elements_of(self.index, value)

    def shown(self, own: Tensor) -> Tensor:
        """``own`` ``[shard_numel]`` in the shape of ``shard``; a DTensor if ``shard`` is one; no copy."""
        return self._shown.shown_as(self.index, own)

    def gather_line(self, values: Tensor) -> Tensor:
        """``values`` ``[shard_numel]`` of every rank as a line for `params_of`. **Collective.**"""
        whole, owner = self._whole, self.layout.owner
        if owner is not None:  # one row is enough
            line = values.new_empty(1, self.layout.shard_numel, device=whole.compute_device)
            if whole.rank == owner:
                line[0] = values
            broadcast(line, owner, whole.comm.group)
            return line
        line = values.new_zeros(whole.line.layout.world_size, self.layout.shard_numel, device=whole.compute_device)
        line[whole.rank, : self.shard_numel] = values
        return whole.gather_rows(line)

    def params_of(self, line: Tensor) -> list[Tensor]:
        """The whole parameter, shaped, from a line ``[W, n]``, or ``[1, n]`` if one rank owns it."""
        runs = [line[piece.row if len(line) > 1 else 0, : piece.target.stop] for piece in self.layout.pieces]
        return [(torch.cat(runs) if runs else line.new_empty(0)).view(self.slots[0].shape)]

    def lay_out(self, values: list[Tensor]) -> Tensor:
        """The whole parameter as a line ``[W, n]`` in new memory."""
        line = values[0].new_zeros(self._whole.line.layout.world_size, self.layout.shard_numel)
        whole = values[0].reshape(-1)
        for piece in self.layout.pieces:
            line[piece.row, : piece.target.stop] = whole[piece.source.start : piece.source.stop]
        return line

    def shaped(self, index: int, flat: Tensor) -> Tensor:
        """The whole parameter, from its elements ``flat`` in the order in which they are cut."""
        return self._whole.line.shaped(self.index, flat)

    def runs_of(self, values: Tensor) -> list[tuple[int, Tensor]]:
        """The index of the first element that this rank owns, and a 1-D view of ``values``, shaped like ``shard``."""
        own = self.layout.pieces_of(self._whole.rank)
        return [(own[0].source.start if own else 0, values.reshape(-1)[:])]


@dataclass(frozen=True)
class _Cuts:
    """The runs of one parameter, one per rank, each at the start of a row of ``shard_numel`` elements.

    ``owner`` is the rank that has all of it, if it is placed by `Owned`.
    """

    pieces: tuple[Piece, ...]
    shard_numel: int
    owner: int | None

    @staticmethod
    def of(layout: FlatLayout, index: int) -> _Cuts:
        own = [piece for piece in layout.pieces if piece.index == index]
        pieces = tuple(Piece(0, piece.row, piece.source, Span(0, piece.source.numel)) for piece in own)
        owner = layout.owners[index] if isinstance(layout, OwnedLayout) else None
        return _Cuts(pieces, max((piece.source.numel for piece in own), default=0), owner)

    def pieces_of(self, rank: int) -> list[Piece]:
        return [piece for piece in self.pieces if piece.row == rank]


Stepped = FlatParam | OrigParam  # an optimizer steps its `shard`
