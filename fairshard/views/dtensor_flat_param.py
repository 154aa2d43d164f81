"""Parameters that are registered as DTensors, and what users may do to these: move, cast, replace, unpickle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fairshard.settings.mesh import SavedMesh
from fairshard.utils.device import current_device
from fairshard.views.routed_flat_param import RoutedFlatParam


class DTensorFlatParam(RoutedFlatParam):
    """A flat param of which a DTensor is registered for each parameter, cut on ``dims``, on the mesh ``placed``."""

    placed: SavedMesh
    dims: list[int | None]

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
            self._link()

    def renew_shard(self, shard: Tensor) -> None:
        """As for any; nothing of the meta device can become something that has memory, so it is made anew."""
        if not self.shard.is_meta:
            super().renew_shard(shard)
            return
        self.shard = nn.Parameter(shard.cpu() if self.on_cpu else shard, requires_grad=self.requires_grad)
        self.versioned = (self.shard, *self.registered)
        computes_on_gpu = self.on_cpu and self.mesh.device_type == "cuda"
        for slot in self.slots:
            slot.renew_leaf(current_device() if computes_on_gpu else shard.device)

    def take(self, index: int, param: DTensor) -> nn.Parameter:
        """Let ``registered[index]``, which is returned, have the values of ``param``, and its dtype if that may change.

        Raises:
            ValueError: ``param`` is cut in another way.
            TypeError: it has another dtype, or is on another device, after the first forward.
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
        elif self.comm is not None:
            raise TypeError(
                f"Dtype and device must be settled before the first forward, but what takes the place of parameter "
                f"`{fqn}` is {param.dtype} on {param.device} where that is {own.dtype} on {own.device}."
            )
        else:
            torch.utils.swap_tensors(own, nn.Parameter(param.detach(), requires_grad=own.requires_grad))
        return own

    def split(self, indexes: Sequence[int]) -> DTensorFlatParam:
        """The parameters ``indexes``, of one dtype and device by now, as a flat param of their own.

        What is registered, and what optimizers know it by, stay. The other parameters must be split off too.
        """
        part = type(self).__new__(type(self))
        part.__dict__.update(self.__dict__)
        part._forget_runtime()
        for name in ("slots", "cuts", "dims", "_trained", "_stepped"):
            setattr(part, name, [getattr(self, name)[index] for index in indexes])
        part.registered = tuple(self.registered[index] for index in indexes)
        part.name = part._key = f"{self.name}_{indexes[0]}"
        part.layout = part.layout_among(self.layout.world_size)
        part.shard_numel = part.layout.shard_numel
        part.requires_grad = any(part._trained)
        part.shard = nn.Parameter(self.shard.detach().new_zeros(part.shard_numel), requires_grad=part.requires_grad)
        part.versioned = (part.shard, *part.registered)
        for index, stepped in enumerate(part._stepped):
            stepped.move_to(part, index)
        part._make_specs(part.shard.dtype)
        part.settle()
        part._link()
        return part

    def _make_specs(self, dtype: torch.dtype) -> None:
        """What DTensors of ``dtype`` say of themselves; made once, for it takes longer than to make them."""
        self._dtype, self._specs = dtype, []
        for slot, dim in zip(self.slots, self.dims, strict=True):
            placements = (*[Replicate()] * (self.mesh.ndim - 1), Replicate() if dim is None else Shard(dim))
            stride = torch.empty(slot.shape, device="meta").stride()
            meta = TensorMeta(slot.shape, stride, dtype)
            self._specs.append(DTensorSpec(self.mesh, placements, tensor_meta=meta))
