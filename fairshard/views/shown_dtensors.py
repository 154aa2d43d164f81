"""Parameters that are registered as DTensors, and what users may do to these: move, cast, replace, unpickle.

The shard ``[S]`` holds the local tensors of all DTensors, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fairshard.params.slot import ParamSlot
from fairshard.settings.mesh import SavedMesh
from fairshard.utils.device import current_device
from fairshard.utils.storage import own_storage
from fairshard.views.cut import Cut
from fairshard.views.rows import Rows
from fairshard.views.rows_grad import RowsGrad
from fairshard.views.shown_runs import ShownRuns
from fairshard.views.viewed_grad import ViewedGrad


class ShownDTensors(ShownRuns):
    """A DTensor for each parameter, cut on ``dims`` by rows among the ranks of the last dimension of ``mesh``."""

    line: Rows

    def __init__(self, slots: list[ParamSlot], mesh: DeviceMesh, dims: Sequence[int | None], on_cpu: bool) -> None:
        rank, world_size = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        self.placed = SavedMesh(mesh)
        self.dims = list(dims)
        # One rank has all rows, in whatever order: in that of memory.
        cut_dims = [dim and 0 for dim in dims] if world_size == 1 else dims
        cuts = [Cut(slot.shape, dim, world_size) for slot, dim in zip(slots, cut_dims, strict=True)]
        super().__init__(slots, Rows(cuts, rank, world_size), on_cpu)
        self.versioned = (self.shard, *self.registered)  # what is written through a DTensor counts there alone

    @property
    def rank(self) -> int:
        """This rank's place in the last dimension of the mesh."""
        return self.line.rank

    @property
    def mesh(self) -> DeviceMesh:
        """What the DTensors lie on; its last dimension shards."""
        return self.placed.mesh

    def connect(self, *groups: ProcessGroup) -> None:
        """Let the DTensors talk through ``groups``, one for each dimension of the mesh, if they have lost theirs."""
        if not self.placed.is_connected:
            self.placed.connect(groups)
        if any(param._spec.mesh is not self.mesh for param in self.registered):  # type: ignore[attr-defined]
            self._make_specs(self.shard.dtype)
            self.link()

    # ---- DTensors and this rank's elements of them

    def _make_specs(self, dtype: torch.dtype) -> None:
        """Make what DTensors of ``dtype`` say of themselves: once, because that is slower than making them."""
        self._dtype, self._specs = dtype, []
        for slot, dim in zip(self.slots, self.dims, strict=True):
            placements = (*[Replicate()] * (self.mesh.ndim - 1), Replicate() if dim is None else Shard(dim))
            stride = torch.empty(slot.shape, device="meta").stride()
            meta = TensorMeta(slot.shape, stride, dtype)
            self._specs.append(DTensorSpec(self.mesh, placements, tensor_meta=meta))
        self._local_shapes = [self.line.own_shape(index) for index in range(len(self.slots))]

    def _make_views(self) -> tuple[nn.Parameter, ...]:
        """Return DTensors whose local tensors are views of the shard."""
        self._make_specs(self.shard.dtype)
        runs = self.line.runs_of(self.shard.detach())
        views = [self.shown_as(index, run) for index, (_, run) in enumerate(runs)]
        return tuple(nn.Parameter(view, requires_grad=self.shard.requires_grad) for view in views)

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
        start, run = self.line.runs_of(self.shard.detach())[index]
        return self.line.flattened(index, value.detach())[start : start + run.numel()]

    def look_at(self, index: int, run: Tensor) -> None:
        """Let ``registered[index]`` be the DTensor of ``run``."""
        view, shown = self.registered[index], self.shown_as(index, run)
        assert isinstance(view, DTensor)
        view._local_tensor, view._spec = shown._local_tensor, shown._spec

    def _own_addresses(self) -> list[int]:
        return [view._local_tensor.data_ptr() for view in self.registered]  # type: ignore[attr-defined]

    def _new_grad(self, *args: Any) -> ViewedGrad:
        return RowsGrad(self, *args)

    # ---- what users do

    def _renew_shard(self, shard: Tensor) -> None:
        """Keep the shard in ``shard``; nothing of the meta device can get memory, so it is made anew."""
        if not self.shard.is_meta:
            super()._renew_shard(shard)
            return
        self.shard = nn.Parameter(shard.cpu() if self.on_cpu else shard, requires_grad=self.shard.requires_grad)
        self.versioned = (self.shard, *self.registered)
        computes_on_gpu = self.on_cpu and self.mesh.device_type == "cuda"
        for slot in self.slots:
            slot.renew_leaf(current_device() if computes_on_gpu else shard.device)

    def take(self, index: int, param: DTensor, is_fixed: bool) -> nn.Parameter:
        """Let ``registered[index]``, which is returned, have the values of ``param``; unless ``is_fixed``, its dtype.

        Raises:
            ValueError: ``param`` is cut in another way.
            TypeError: it has another dtype, or is on another device, although that ``is_fixed``.
        """
        own, fqn = self.registered[index], self.slots[index].fqn
        assert isinstance(own, DTensor)
        if (param.shape, param.placements, param.device_mesh) != (own.shape, own.placements, own.device_mesh):
            raise ValueError(
                f"What takes the place of parameter `{fqn}` must be cut as it is, {tuple(own.shape)} by "
                f"{own.placements} on {own.device_mesh}, but is {tuple(param.shape)} by {param.placements} on "
                f"{param.device_mesh}."
            )
        own.requires_grad_(param.requires_grad)
        if (param.dtype, param.device) == (own.dtype, own.device):
            with torch.no_grad():
                own.copy_(param)
        elif is_fixed:
            raise TypeError(
                f"Dtype and device must be settled before the first forward, but what takes the place of parameter "
                f"`{fqn}` is {param.dtype} on {param.device} where that is {own.dtype} on {own.device}."
            )
        else:
            torch.utils.swap_tensors(own, nn.Parameter(param.detach(), requires_grad=own.requires_grad))
        return own

    def split(self, indexes: Sequence[int]) -> ShownDTensors:
        """The parameters ``indexes``, of one dtype and device by now, shown from a shard of their own.

        What is registered, and what optimizers know it by, stay. The other parameters must be split off too.
        """
        part = type(self).__new__(type(self))
        part.__dict__.update(self.__dict__)
        for name in ("slots", "dims", "_stepped"):
            setattr(part, name, [getattr(self, name)[index] for index in indexes])
        part.registered = tuple(self.registered[index] for index in indexes)
        part.line = self.line.of(indexes)
        shard = self.shard.detach().new_zeros(part.line.shard_numel)
        part.shard = nn.Parameter(shard, requires_grad=any(view.requires_grad for view in part.registered))
        part.versioned = (part.shard, *part.registered)
        part._make_specs(part.shard.dtype)
        return part

    # ---- copies

    def __getstate__(self) -> dict[str, Any]:
        # What is registered has all elements, and is copied by the modules: the shard would be there twice.
        shard = nn.Parameter(self.shard.detach().new_empty(0), requires_grad=self.shard.requires_grad)
        own = {"dims": self.dims, "placed": self.placed, "shard": shard, "versioned": ()}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        shard = self.shard.detach().new_zeros(self.line.shard_numel)
        for index, (_, run) in enumerate(self.line.runs_of(shard)):
            run.copy_(self.own_of(index))
        self.shard = nn.Parameter(shard, requires_grad=self.shard.requires_grad)
        self._make_specs(shard.dtype)
        super().__setstate__({"shard": self.shard})
