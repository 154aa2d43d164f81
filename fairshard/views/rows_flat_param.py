"""Parameters that are each cut by rows, so that what is registered is a DTensor under the original name.

As any flat param, but the buffer ``[W, S]`` holds each rank's rows side by side, and whole parameters are copied out
of it into memory of their own (one copy; none where there is one parameter, whose rows follow each other)::

    shard    [S]        the local tensors of all DTensors, one after the other
    buffer   [W, S]     from the gather to the copy
    line     [numel]    while gathered: the leaves are views of it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fairshard.params.kept_part import KeptPart
from fairshard.params.shard_grad import GradTransfers
from fairshard.params.slot import ParamSlot
from fairshard.settings.config import UnitConfig
from fairshard.settings.mesh import SavedMesh
from fairshard.utils.collectives import Communicators, exchange_tag
from fairshard.utils.custom_comms import Ready
from fairshard.utils.device import now
from fairshard.utils.rows_layout import RowsLayout
from fairshard.utils.span import Span, cut
from fairshard.utils.storage import alloc_storage_, free_storage_, own_storage
from fairshard.views.cut import Cut
from fairshard.views.dtensor_flat_param import DTensorFlatParam
from fairshard.views.joint_gather import Joining, JointGather
from fairshard.views.rows_grad import RowsGrad


class RowsFlatParam(DTensorFlatParam):
    """A flat param whose parameters are cut by rows among the ranks of a dimension of ``mesh``."""

    layout: RowsLayout
    _line: Tensor | None
    _sources: list[Tensor]
    _targets: list[Tensor]
    _together: list[RowsFlatParam]  # those that one gather brings, in order

    def __init__(
        self, slots: list[ParamSlot], name: str, mesh: DeviceMesh, dims: Sequence[int | None], on_cpu: bool
    ) -> None:
        rank, world_size = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        self.placed = SavedMesh(mesh)
        self.dims = list(dims)
        # One rank has all rows, in whatever order: in that of memory.
        cut_dims = [dim and 0 for dim in dims] if world_size == 1 else dims
        self.cuts = [Cut(slot.shape, dim, world_size) for slot, dim in zip(slots, cut_dims, strict=True)]
        super().__init__(slots, name, rank, world_size, on_cpu)
        self.versioned = (self.shard, *self.registered)  # what is written through a DTensor counts there alone

    # ---- layout

    def layout_among(self, world_size: int) -> RowsLayout:
        """Where each parameter lies."""
        return RowsLayout([cut.size for cut in self.cuts], world_size)

    def flattened(self, index: int, value: Tensor) -> Tensor:
        """The elements of the whole parameter ``index``, those of each rank after those of the one before."""
        each = self.cuts[index]
        return (each.parts(value) if each.dim else value).reshape(-1)

    def lay_out(self, values: list[Tensor]) -> Tensor:
        """Whole parameters as a buffer ``[W, S]`` in new memory, padded with zeros."""
        buffer = values[0].new_zeros(self.layout.world_size, self.shard_numel)
        for index, value in enumerate(values):
            for block in self.layout.blocks(index):
                block.of(buffer).copy_(block.like(self.flattened(index, value)))
        return buffer

    # ---- what is registered

    def _make_specs(self, dtype: torch.dtype) -> None:
        super()._make_specs(dtype)
        rows = [self.layout.num_rows(index, self.rank) for index in range(len(self.cuts))]
        self._local_shapes = [each.shape_of(num_rows) for each, num_rows in zip(self.cuts, rows, strict=True)]

    def shown_as(self, index: int, run: Tensor) -> DTensor:
        """``run``, this rank's elements of parameter ``index``, as a part of the whole; no copy, no communication."""
        if self._dtype != run.dtype:
            self._make_specs(run.dtype)
        local = own_storage(run.view(self._local_shapes[index]))
        return DTensor(local, self._specs[index], requires_grad=False)

    def elements_of(self, index: int, value: Tensor) -> Tensor:
        """This rank's elements of ``value``, a DTensor or, whole, what stands for parameter ``index``."""
        if isinstance(value, DTensor):
            return value._local_tensor.detach().reshape(-1)
        start, run = self.runs_of(self.shard.detach())[index]
        return self.flattened(index, value.detach())[start : start + run.numel()]

    def make_views(self) -> tuple[nn.Parameter, ...]:
        """DTensors whose local tensors are views of the shard."""
        self._make_specs(self.shard.dtype)
        runs = self.runs_of(self.shard.detach())
        views = [self.shown_as(index, run) for index, (_, run) in enumerate(runs)]
        return tuple(nn.Parameter(view, requires_grad=self.requires_grad) for view in views)

    def _own_addresses(self) -> list[int]:
        return [view._local_tensor.data_ptr() for view in self.registered]  # type: ignore[attr-defined]

    def look_at(self, index: int, run: Tensor) -> None:
        """Let ``registered[index]`` be the DTensor of ``run``."""
        view, shown = self.registered[index], self.shown_as(index, run)
        assert isinstance(view, DTensor)
        view._local_tensor, view._spec = shown._local_tensor, shown._spec

    def materialize(self, comms: Communicators, config: UnitConfig, transfers: GradTransfers, on_grad: Any) -> None:
        """As for any flat param."""
        self.make_grad = partial(RowsGrad, self)
        super().materialize(comms, config, transfers, on_grad)

    # ---- whole parameters

    def _whole_params(self, buffer: Tensor) -> list[Tensor]:
        """Views of ``buffer`` if whole parameters lie there, else of the line that `_copy_out` copies them to."""
        if self.layout.world_size == 1 or (len(self.slots) == 1 and self.cuts[0].dim == 0):
            self._line = None
            spans = [Span(start, start + n) for start, n in zip(self.layout.columns, self.layout.numels, strict=True)]
            flat = buffer.view(-1)
            return [flat[span.start : span.stop].view(each.shape) for each, span in zip(self.cuts, spans, strict=True)]
        return self._views_beside(buffer)

    def _views_beside(self, buffer: Tensor) -> list[Tensor]:
        line, views, sources, targets = self._line_beside(buffer)
        self._line, self._sources, self._targets = line, sources, targets
        free_storage_(line)
        return views

    def params_of(self, line: Tensor) -> list[Tensor]:
        """The parameters, shaped, of a gathered buffer of ``W * S`` elements, in memory of their own."""
        _, views, sources, targets = self._line_beside(line.view(self.layout.world_size, -1))
        torch._foreach_copy_(targets, sources)
        return views

    def _line_beside(self, buffer: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
        """New memory ``[numel]``, the parameters in it, and what is copied from where in ``buffer`` to where in it."""
        world_size = self.layout.world_size
        line = buffer.new_empty(cut(self.layout.numel, world_size) * world_size)  # a part of it can be kept
        sources, targets, params = [], [], []
        for index, each in enumerate(self.cuts):
            span = self.layout.param_span(index)
            flat = line[span.start : span.stop]
            params.append(flat.view(each.shape))
            for block in self.layout.blocks(index):
                if each.dim is None:
                    block = replace(block, rows=Span(0, 1))
                source = each.stacked(block.of(buffer)) if each.dim else block.of(buffer)
                sources.append(source)
                targets.append(each.parts(params[-1]) if each.dim else block.like(flat))
        return line, params, sources, targets

    def shaped(self, index: int, flat: Tensor) -> Tensor:
        """The whole of parameter ``index`` of its elements, in the order of `flattened`."""
        each = self.cuts[index]
        if not each.dim or not flat.numel():
            return flat.view(each.shape)
        parts = each.stacked(flat.view(each.world_size, -1))
        return parts.movedim(0, each.dim).flatten(each.dim, each.dim + 1)

    @property
    def kept_line(self) -> Tensor:
        """The line that the leaves are views of."""
        return self.buffer if self._line is None else self._line

    def unshard(self, part: KeptPart | None = None) -> None:
        """Start gathering into the buffer, or from a ``part`` straight into the line. **Collective.**"""
        if part is not None and self._line is not None:
            alloc_storage_(self._line)
            self.is_gathered = True
            self._uses += 1
            self._transfer = self.gather_from(part).start(exchange_tag("all_gather", self.tag_id, self._uses))
            self._is_to_copy = False
            return
        super().unshard(part)
        self._is_to_copy = self._line is not None and self._transfer is not None
        if self.compute_device.type == "cuda" and self is self._together[-1]:
            for each in self._together:  # on this stream, and not where compute would wait for it
                if each._is_to_copy:
                    each._copy_out()
                    each._transfer = Ready(now(self.compute_device))

    def wait_unshard(self) -> None:
        """Wait for the gather under way, if any, copy the parameters out, hang the leaves into their modules."""
        if self._is_to_copy:
            self._copy_out()
        super().wait_unshard()

    def reshard(self) -> None:
        """Give all memory back and take the leaves off their modules."""
        super().reshard()
        self._is_to_copy = False
        if self._line is not None:
            free_storage_(self._line)

    @torch.no_grad()
    def _copy_out(self) -> None:
        assert self._transfer is not None
        transfer, self._transfer, self._is_to_copy = self._transfer, None, False
        transfer.wait()
        assert self._line is not None
        alloc_storage_(self._line)
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)
        if self is self._together[-1]:
            self._storage.resize_(0)

    def gather_with(self, others: list[RowsFlatParam], joint: JointGather, columns: Tensor) -> None:
        """Gather into ``columns`` of ``joint``'s buffer from now on, in one with ``others`` (this one among them)."""
        self._together = others
        self.buffer, self._row = columns, columns[self.rank]
        self._storage, self._nbytes = joint.buffer.untyped_storage(), joint.buffer.nbytes
        self._gather = joint if self is others[-1] else Joining(joint)
        self._views = [view.data for view in self._views_beside(columns)]
        self._hook_leaves()

    # ---- gradients

    def bucket_views(self, columns: Tensor) -> list[list[Tensor]]:
        """For each parameter the blocks of ``columns`` ``[W, S]`` where its gradient goes; last, the empty ones."""
        views = []
        for index, each in enumerate(self.cuts):
            blocks = [block.of(columns) for block in self.layout.blocks(index)]
            views.append([each.stacked(block) for block in blocks] if each.dim else blocks)
        return [*views, [block.of(columns) for block in self.layout.empty_blocks]]

    def cut_as(self, runs: list[Tensor], index: int, value: Tensor) -> Sequence[Tensor]:
        """``value``, the whole of parameter ``index``, cut as ``runs``, its `bucket_views`, are."""
        if self.cuts[index].dim:
            return [self.cuts[index].parts(value) for _ in runs]
        flat = value.reshape(-1)
        return [block.like(flat) for block in self.layout.blocks(index)]

    # ---- copies

    def _forget_runtime(self) -> None:
        super()._forget_runtime()
        self._line = None
        self._sources, self._targets = [], []
        self._is_to_copy = False
        self._together = [self]

    def __getstate__(self) -> dict[str, Any]:
        # What is registered has all elements, and is copied by the modules: the shard would be there twice.
        shard = nn.Parameter(self.shard.detach().new_empty(0), requires_grad=self.requires_grad)
        own = {"cuts": self.cuts, "dims": self.dims, "placed": self.placed, "shard": shard, "versioned": ()}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        shard = self.shard.detach().new_zeros(self.shard_numel)
        for index, (_, run) in enumerate(self.runs_of(shard)):
            run.copy_(self.own_of(index))
        self.shard = nn.Parameter(shard, requires_grad=self.requires_grad)
        self._make_specs(shard.dtype)
        super().__setstate__({"shard": self.shard})


def join_gathers(flat_params: Sequence[object]) -> None:
    """Let one gather bring all of ``flat_params``, those of one unit, as far as there is anything to gather."""
    rows = [each for each in flat_params if isinstance(each, RowsFlatParam) and each.shard_numel]
    if len(rows) < 2 or rows[0].layout.world_size == 1:
        return
    joint = JointGather(rows)
    for each, columns in zip(rows, joint.columns, strict=True):
        each.gather_with(rows, joint, columns)
    free_storage_(joint.buffer)  # views cannot be taken after
