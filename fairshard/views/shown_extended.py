"""One parameter registered as a DTensor whose local tensor is a tensor subclass that defines what is gathered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fairshard.params.extended_slot import ExtendedSlot
from fairshard.settings.mesh import SavedMesh
from fairshard.utils.subclasses import rows_of
from fairshard.views.cut import Cut
from fairshard.views.rows import Rows
from fairshard.views.shown_dtensors import ShownDTensors


class ShownExtended(ShownDTensors):
    """The DTensor of one parameter. Its local tensor has the values, and optimizers step it.

    ``shard`` ``[S]`` only has the shape, dtype and device of the local tensor's elements, and the gradient; all its
    elements are one NaN.
    """

    def __init__(self, slot: ExtendedSlot, mesh: DeviceMesh, on_cpu: bool, device: torch.device) -> None:
        rank, world_size = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        self.placed, self.dims = SavedMesh(mesh), [0]
        self.slots, self.line = [slot], Rows([Cut(slot.shape, 0, world_size)], rank, world_size)
        self.on_cpu, self.place = on_cpu, None
        rows = rows_of(slot.leaf, slot.fqn, rank, world_size)
        target = torch.device("cpu") if on_cpu else device
        rows = rows if rows.is_meta or rows.device == target else rows.to(target)
        self._make_specs(rows.dtype)
        shown = DTensor(rows, self._specs[0], requires_grad=False)
        self.registered = (nn.Parameter(shown, requires_grad=slot.leaf.requires_grad),)
        self._stepped = []
        self._renew_stand_in()
        slot.register(self.registered[0])

    @property
    def local(self) -> Tensor:
        """This rank's rows."""
        local: Tensor = self.registered[0]._local_tensor  # type: ignore[attr-defined]
        return local

    @property
    def class_name(self) -> str:
        """The name of the subclass."""
        return type(self.local).__name__

    def describe(self, index: int) -> str:
        """See `ShownDTensors.describe`."""
        return f"a {self.class_name}, {super().describe(index)}"

    def _renew_stand_in(self) -> None:
        local = self.local
        line = torch.full((1,), torch.nan, dtype=local.dtype, device=local.device).expand(self.line.shard_numel)
        self.shard = nn.Parameter(line, requires_grad=self.registered[0].requires_grad)
        self._make_specs(local.dtype)
        self.versioned = (self.shard, *self.registered)
        self._watch()

    def own_of(self, index: int) -> Tensor:
        """As many elements as this rank owns; not their values, which only the subclass can read."""
        return self.line.runs_of(self.shard.detach())[index][1]

    # ---- changes by users

    @property
    def has_moved(self) -> bool:
        """Whether the local tensor has another dtype or device than before, or ``.data`` was assigned."""
        return self._is_converted or self._watched[0].is_assigned(self.registered[0])

    @property
    def _is_converted(self) -> bool:
        local, shard = self.local, self.shard
        return local.dtype != shard.dtype or local.device != shard.device

    def adopt_assigned(self, is_fixed: bool) -> bool:
        """Adopt another dtype or device; returns whether there was one.

        Raises:
            TypeError: ``is_fixed``, and one has changed.
            FairshardError: see `check_not_assigned`.
        """
        self.check_not_assigned()
        if not self._is_converted:
            return False
        local, shard = self.local, self.shard
        if is_fixed:
            raise TypeError(
                f"Dtype and device must be fixed before the first forward, but parameter `{self.slots[0].fqn}` (rank "
                f"{self.rank}) went from {shard.dtype} on {shard.device} to {local.dtype} on {local.device}. Convert "
                "the model before its first forward."
            )
        if shard.is_meta and not self.on_cpu:
            self.slots[0].renew_leaf(local.device)
        self._renew_stand_in()
        return True

    def link(self) -> None:
        """Use the current mesh; the local tensor keeps its own memory."""
        own: Any = self.registered[0]
        if own._spec.mesh is not self.mesh:
            own._spec = self._specs[0]

    # ---- moving

    def move_to(self, device: torch.device) -> None:
        """Move the local tensor to ``device``."""
        own: Any = self.registered[0]
        if own._local_tensor.device != device:
            with torch.no_grad():
                own._local_tensor = own._local_tensor.to(device)
            self._renew_stand_in()

    # ---- copies

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._stepped = []
        self._renew_stand_in()
