"""One original parameter of a flat param: the part that this rank owns."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fairshard.params.flat_param import FlatParam
from fairshard.params.gathered import Gather
from fairshard.params.line import FlatLine
from fairshard.utils.collectives import RowGather, exchange_tag
from fairshard.utils.messages import broadcast
from fairshard.utils.placed_layout import Runs
from fairshard.views.viewed_grad import OrigGrad


class OrigParam:
    """One original parameter, with the interface of a flat param for optimizers and their state.

    ``index`` is its place among the parameters of the flat param.
    """

    _shown: Any  # runs or DTensors; only DTensors have `check_not_assigned`

    def __init__(self, whole: FlatParam, index: int) -> None:
        self.move_to(whole, index)

    def move_to(self, whole: FlatParam, index: int) -> None:
        """Become parameter ``index`` of ``whole``."""
        self.__dict__.clear()  # also drops the cached line
        self._whole = whole
        self._shown = whole.shows
        self.index = index
        self.slots = [whole.slots[index]]
        self.shard = whole.shows.registered[index]
        self.shard_numel = self._shown.own_of(index).numel()

    def check_not_assigned(self) -> None:
        """See `ShownDTensors.check_not_assigned`."""
        self._shown.check_not_assigned((self.index,))

    def __getattr__(self, name: str) -> Any:
        """All other attributes (ranks, devices, dtypes) are those of the flat param."""
        return getattr(self._whole, name)

    @cached_property
    def line(self) -> OrigLine:
        """The line of this parameter alone."""
        return OrigLine(self._whole.line, self.index)

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
        own: Tensor = self._shown.elements_of(self.index, value)
        return own

    def shown(self, own: Tensor) -> Tensor:
        """``own`` ``[shard_numel]`` in the shape of ``shard``; a DTensor if ``shard`` is one; no copy."""
        shown: Tensor = self._shown.shown_as(self.index, own)
        return shown

    def gather_line(self, values: Tensor) -> Tensor:
        """``values`` ``[shard_numel]`` of every rank as a line for `OrigLine.params_of`. **Collective.**"""
        whole, layout, owner = self._whole, self.line.layout, self.line.owner
        if owner is not None:  # one row is enough
            line = values.new_empty(1, layout.shard_numel, device=whole.compute_device)
            if self.line.rank == owner:
                line[0] = values
            broadcast(line, owner, whole.comm.group)
            return line
        line = values.new_zeros(layout.world_size, layout.shard_numel, device=whole.compute_device)
        line[self.line.rank, : self.shard_numel] = values
        return gather_rows(whole, line, RowGather(whole.comm, line))


class OrigLine:
    """Parameter ``index`` of the line ``whole`` as a line ``[W, n]``: each rank's run, padded to the longest.

    ``owner`` is the rank that has all of it, if it is placed by `Owned`.
    """

    def __init__(self, whole: FlatLine, index: int) -> None:
        self.whole, self.rank, self._index = whole, whole.rank, index
        self.layout = Runs.of(whole.layout, index)
        self.owner = owners[index] if (owners := getattr(whole.layout, "owners", None)) else None

    def params_of(self, line: Tensor) -> list[Tensor]:
        """The whole parameter, shaped, from a line ``[W, n]``, or ``[1, n]`` if one rank owns it."""
        runs = [line[piece.row if len(line) > 1 else 0, : piece.target.stop] for piece in self.layout.pieces]
        return [(torch.cat(runs) if runs else line.new_empty(0)).view(self.whole.shapes[self._index])]

    def lay_out(self, values: list[Tensor]) -> Tensor:
        """The whole parameter as a line ``[W, n]`` in new memory."""
        line = values[0].new_zeros(self.layout.world_size, self.layout.shard_numel)
        whole = values[0].reshape(-1)
        for piece in self.layout.pieces:
            line[piece.row, : piece.target.stop] = whole[piece.source.start : piece.source.stop]
        return line

    def shaped(self, index: int, flat: Tensor) -> Tensor:
        """The whole parameter, from its elements ``flat`` in the order in which they are cut."""
        return self.whole.shaped(self._index, flat)

    def runs_of(self, values: Tensor) -> list[tuple[int, Tensor]]:
        """The index of the first element that this rank owns, and a 1-D view of ``values``, shaped like ``shard``."""
        own = self.layout.pieces_of(self.rank)
        return [(own[0].source.start if own else 0, values.reshape(-1)[:])]


def gather_rows(flat_param: FlatParam, rows: Tensor, gather: Gather) -> Tensor:
    """Fill ``rows``, in which this rank's row is already written, by ``gather``. **Collective.**"""
    if rows.numel():
        gather.start(exchange_tag("all_gather", flat_param.tag_id, next(flat_param.uses))).wait()
    return rows


Stepped = FlatParam | OrigParam  # an optimizer steps its `shard`
