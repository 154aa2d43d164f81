"""This rank's elements of one original parameter, in whatever form the parameter is registered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fairshard.checks.shards import stepped_of
from fairshard.errors import FairshardError, ShardOptimizerError
from fairshard.params.flat_param import FlatParam
from fairshard.params.line import FlatLine
from fairshard.params.rule import GradHome
from fairshard.utils.collectives import Communicator
from fairshard.utils.groups import communicator
from fairshard.utils.placed_layout import OwnedLayout
from fairshard.utils.span import Span
from fairshard.views.extended_param import ShownExtended
from fairshard.views.orig_param import OrigParam, Stepped
from fairshard.views.rows import is_ordered


class OwnPart:
    """One original parameter of ``param``, which an optimizer holds: a shard of it, of several, or a plain tensor.

    Attributes:
        shape: the shape of the whole parameter.
        spans: for each rank the elements that it has, counted in the order in which they are cut.
        rank: the index of this rank in ``spans``.
        is_ordered: whether that order is the order of memory.
        is_part_of_dtensor: whether the parameter is itself a part of a larger one, cut by tensor parallelism.
    """

    is_part_of_dtensor = False

    def __init__(self, param: nn.Parameter, stepped: Stepped | None, index: int) -> None:
        self.param = param
        self._stepped = stepped
        # Of the parameter on the line; `index` counts the parameters that an optimizer sees through `param`.
        self._place = stepped.index if isinstance(stepped, OrigParam) else index
        self._line = _line_of(stepped)
        if stepped is None or self._line is None:
            self.name = f"a parameter of shape {tuple(param.shape)} outside of all units"
            self.shape, self.rank, self.is_ordered = param.shape, 0, True
            self.spans: tuple[Span, ...] = (Span(0, param.numel()),)
            return
        slot = stepped.slots[index]
        self.name, self.shape, self.rank = f"`{slot.fqn}`", slot.shape, self._line.rank
        self.is_part_of_dtensor = slot.has_mesh and slot.leaf.shape != slot.shape
        self.is_ordered = is_ordered(self._line, self._place)
        spans = [Span(0, 0)] * self._line.layout.world_size
        for piece in stepped.line.layout.pieces:
            if piece.index == index:
                spans[piece.row] = piece.source
                if piece.row == self.rank:
                    self._target = piece.target
        self.spans = tuple(spans)

    @property
    def layout(self) -> object:
        """See `layout_of`."""
        return None if self._line is None else self._line.layout

    @property
    def span(self) -> Span:
        """The elements that this rank has."""
        return self.spans[self.rank]

    @property
    def device(self) -> torch.device:
        """The device that computes with the parameter; the parameter itself may be in host memory."""
        device: torch.device = getattr(self._stepped, "compute_device", self.param.device)
        return device

    @property
    def is_owned(self) -> bool:
        """Whether it is placed by `Owned`: on every rank known to be whole on one."""
        return self._line is not None and isinstance(self._line.layout, OwnedLayout)

    @property
    def comm(self) -> Communicator | None:
        """The ranks of ``spans``; None for a plain tensor. **Collective** the first time before a first forward.

        Raises:
            FairshardError: no forward has run, and the parameter does not know its group.
        """
        stepped = self._stepped
        if stepped is None:
            return None
        if stepped.comm is None and isinstance(self.param, DTensor):
            return communicator(self.param.device_mesh.get_group(self.param.device_mesh.ndim - 1))
        if stepped.comm is None:
            raise FairshardError(
                f"A forward must have run before matrices that are cut among ranks are stepped, but {self.name} has "
                "never been gathered. Run the forward and backward first."
            )
        comm: Communicator = stepped.comm
        return comm

    @property
    def is_connected(self) -> bool:
        """Whether `comm` is known: after a first forward, and for DTensors always."""
        return self._stepped is not None and (self._stepped.comm is not None or isinstance(self.param, DTensor))

    def own(self, value: Tensor) -> Tensor:
        """A view of this rank's elements of ``value``, shaped like ``param``: ``[n]``; a plain tensor is shaped."""
        stepped = self._stepped
        if stepped is None:
            return value.detach()
        if not isinstance(stepped, FlatParam):
            return stepped.own_of(value).reshape(-1)
        return value.detach()[self._target.start : self._target.stop] if self.span.numel else value.detach()[:0]

    def grad(self) -> Tensor | None:
        """This rank's elements of the gradient, in the parameter's dtype and on its device; None if missing."""
        grad = self._whole_grad()
        if grad is None:
            return None
        param = self.param
        return self.own(grad).to(device=param.device, dtype=param.dtype)

    @property
    def has_grad(self) -> bool:
        """Whether there is a gradient on this rank."""
        return self._whole_grad() is not None

    def _whole_grad(self) -> Tensor | None:
        grad = None if self._stepped is None else self._stepped.grad
        if grad is not None and grad.home is GradHome.HELD:
            held: Tensor | None = grad.value
            return held
        return self.param.grad

    def shaped(self, flat: Tensor) -> Tensor:
        """The whole parameter, contiguous, from its elements ``flat`` in the order in which they are cut."""
        if self._line is None:
            return flat.view(self.shape)
        return self._line.shaped(self._place, flat).contiguous()

    def flattened(self, whole: Tensor) -> Tensor:
        """The elements of ``whole``, in the order in which they are cut."""
        return whole.reshape(-1) if self._line is None else self._line.flattened(self._place, whole)


def own_parts(param: nn.Parameter) -> list[OwnPart]:
    """The original parameters of ``param``; one, except for a flat shard.

    Raises:
        ShardOptimizerError: elements of a parameter are also cut among ranks in a way that fairshard does not know, or
            are not plain numbers.
    """
    stepped: Any = stepped_of(param)
    if stepped is None:
        if isinstance(param, DTensor):
            raise ShardOptimizerError(
                f"fairshard's Muon must hold plain tensors or the parameters of sharded modules, but one is a DTensor "
                f"of shape {tuple(param.shape)} on {param.device_mesh}. Call fully_shard on its module first, or use "
                "torch.optim.Muon."
            )
        return [OwnPart(param, None, 0)]
    if isinstance(getattr(stepped, "shows", None), ShownExtended):
        raise ShardOptimizerError(
            f"Muon must step plain tensors, but `{stepped.name}` is a {stepped.shows.class_name}, a tensor subclass. "
            "Use an optimizer that knows the subclass for it."
        )
    return [OwnPart(param, stepped, index) for index in range(len(stepped.slots))]


def layout_of(param: nn.Parameter) -> object:
    """The layout by which ``param`` is cut; another object if that has changed. None for a plain tensor."""
    line = _line_of(stepped_of(param))
    return None if line is None else line.layout


def _line_of(stepped: Stepped | None) -> FlatLine | None:
    """The line on which the parameter of ``stepped`` is cut, with others; None for a plain tensor."""
    if isinstance(stepped, OrigParam):
        return stepped.line.whole
    return None if stepped is None else stepped.line
