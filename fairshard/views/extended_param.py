"""One parameter of a tensor subclass that defines what is gathered from its shards, as a flat param of its own.

Gradients take the same path as those of other parameters; only the gather differs: see `Extension`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fairshard.params.extended_slot import ExtendedSlot
from fairshard.params.flat_param import FlatParam
from fairshard.params.gathered import Gathered
from fairshard.params.rule import Rule
from fairshard.params.shard_grad import GradTransfers
from fairshard.utils.collectives import Communicator, Communicators
from fairshard.views.extended_gathered import ExtendedGathered
from fairshard.views.extension import Extension, Whole
from fairshard.views.shown_extended import ShownExtended


class ExtendedParam(FlatParam):
    """See `FlatParam`. ``policy`` is the user's mixed precision policy, which the subclass is given."""

    shows: ShownExtended
    slots: list[ExtendedSlot]  # type: ignore[assignment]
    _extension: Extension | None = None

    def __init__(self, shows: ShownExtended, name: str, policy: Any) -> None:
        self._policy = policy
        super().__init__(shows, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_policy": self._policy}

    def compute_dtype_under(self, rule: Rule) -> torch.dtype:
        """The dtype that the leaf has; before the first gather, that for which the subclass is asked."""
        if self._extension is not None:
            return self._extension.leaf.dtype
        return super().compute_dtype_under(rule)

    def materialize(self, comms: Communicators, rule: Rule, transfers: GradTransfers, on_grad: Any) -> None:
        """See `FlatParam.materialize`. Gathers once, because the subclass makes the leaf: **collective**."""
        if not self.shows.on_cpu:
            self.shows.move_to(transfers.device)
        slot = self.slots[0]
        self._extension = None
        whole = Whole(slot.fqn, _last_dim_of(self.shows.mesh), slot.shape, slot.owners[0][0], self._policy)
        extension = Extension(whole, self.compute_dtype_under(rule), transfers.device)
        with torch.inference_mode(False), torch.no_grad():
            extension.first(self._newest_on(transfers.device), comms.shard, slot.leaf.requires_grad)
        slot.compute_with(extension.leaf)
        self._extension = extension
        super().materialize(comms, rule, transfers, on_grad)

    def _make_gathered(self, comm: Communicator) -> Gathered:
        assert self._extension is not None
        self.computes_on_shard = False
        gathered = ExtendedGathered.alone(self._extension, comm)
        gathered.free()
        return gathered

    def _place_on_cpu(self, keep_on_device: bool) -> None:
        self.shows.move_to(torch.device("cpu"))

    def _newest(self) -> Tensor:
        """The current shard, a tensor subclass, on the compute device."""
        return self._newest_on(self.compute_device)

    def _newest_on(self, device: torch.device) -> Tensor:
        local = self.shows.local
        if local.device == device:
            return local
        with torch.inference_mode(False), torch.no_grad():
            return local.to(device, non_blocking=True)


def _last_dim_of(mesh: DeviceMesh) -> DeviceMesh:
    """The 1-D mesh of the ranks that parameters are cut among."""
    if mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names is not None:
        return mesh[mesh.mesh_dim_names[-1]]
    return DeviceMesh.from_group(mesh.get_group(mesh.ndim - 1), mesh.device_type)
