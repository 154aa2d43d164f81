"""Registered parameters that were DTensors before they were sharded, on a larger mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fairshard.errors import FairshardError
from fairshard.params.dtensor_slot import DTensorSlot
from fairshard.settings.data_mesh import DataMesh
from fairshard.utils.dtensors import part_of
from fairshard.views.shown_dtensors import ShownDTensors


class ShownPlaced(ShownDTensors):
    """A DTensor for each parameter, on a mesh of the ranks of ``data`` and those of the parameter's own mesh.

    The lines hold local tensors: this rank's part of them among the ranks of ``data`` is its part of the parameter.
    """

    slots: list[DTensorSlot]  # type: ignore[assignment]

    def __init__(self, slots: list[DTensorSlot], data: DataMesh, dims: Sequence[int | None], on_cpu: bool) -> None:
        for slot in slots:
            slot.dp_dims = data.dp_dims_of(slot.spec)
        self._is_cut = data.shards
        self._whole_as = [data.placed(slot.spec, dim) for slot, dim in zip(slots, dims, strict=True)]
        super().__init__(list(slots), data.mesh, dims, on_cpu)

    per_param = (*ShownDTensors.per_param, "_whole_as")
    kept = ("_is_cut", "_whole_as")

    def _seat(self, mesh: DeviceMesh) -> tuple[int, int]:
        return super()._seat(mesh) if self._is_cut else (0, 1)

    def _make_specs(self, dtype: torch.dtype) -> None:
        self._dtype, self._specs = dtype, []
        for slot, placed in zip(self.slots, self._whole_as, strict=True):
            own = slot.spec.tensor_meta
            assert own is not None
            meta = TensorMeta(own.shape, own.stride, dtype)
            self._specs.append(DTensorSpec(placed.mesh, placed.placements, tensor_meta=meta))
        self._local_shapes = [self.line.own_shape(index) for index in range(len(self.slots))]

    def connect(self, *groups: ProcessGroup) -> None:
        """Restore the DTensors' meshes after a deepcopy."""
        self._make_specs(self.shard.dtype)
        if any(own._spec.mesh is not spec.mesh for own, spec in zip(self.registered, self._specs, strict=True)):  # type: ignore[attr-defined]
            self.link()

    def follow_mesh(self, mesh: DeviceMesh) -> None:
        """Refuse another mesh."""
        raise FairshardError(
            f"The mesh of a model with parameters that were DTensors must not change, but `{self.slots[0].fqn}` would "
            f"go from {self.mesh} to {mesh}. Build the model on the new mesh, and load its state dict."
        )

    def elements_of(self, index: int, value: Tensor) -> Tensor:
        """This rank's elements of ``value``: a DTensor, or a whole tensor in the shape of the whole parameter."""
        if not isinstance(value, DTensor):
            like: Any = self.registered[index]
            value = part_of(value, like)
        return value._local_tensor.detach().reshape(-1)
